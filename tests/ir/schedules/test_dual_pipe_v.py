"""DualPipeV's eight phases with their counts, and how little it takes to write it."""

from __future__ import annotations

import ast
import inspect

import pytest
from schedule_oracle import opposite, vee

from autopiper.ir.schedules import dual_pipe_v, rows
from autopiper.plan.passes import PassGroup


def phases(r: int, R: int, M: int) -> list[str]:
    """As published: each phase a text, times its count. "F0+B1" overlaps."""
    out = ["F0"] * (2 * (R - r - 1))
    out += ["F0", "F1"] * (r + 1)
    out += ["I1", "W1", "F1"] * (R - r - 1)
    main = ["F0+B1", "F1+B0"] * (M - 2 * R + r + 1)
    if main and r == R - 1:
        main[:1] = ["F0", "B1"]
    out += main
    out += ["B1", "F1+B0"] * (R - r - 1)
    drain = ["B1", "B0"] * (r + 1)
    drain[r + 1 :] = ["I" + each[1] for each in drain[r + 1 :]]  # half way
    out += drain
    out += ["W", "I0"] * (R - r - 1)
    return out + ["W"] * (r + 1)


@pytest.mark.parametrize("R", [1, 2, 3, 4, 5, 8])
def test_eight_phases(R: int) -> None:
    for M in (2 * R, 2 * R + 1, 3 * R + 2):
        for r, row in enumerate(rows("dualpipe-v", vee(R, M), {})):
            seen = ["+".join(p.kind + str(int(p.stage >= R)) for p in group) for group in row]
            expected = phases(r, R, M)
            assert [s[: len(e)] for s, e in zip(seen, expected, strict=True)] == expected
            in_order: dict[tuple[str, int], list[int]] = {}
            for group in row:
                for p in group:
                    in_order.setdefault((p.kind.replace("I", "B"), p.stage), []).append(p.micro_batch)
            assert all(each == list(range(M)) for (kind, _), each in in_order.items() if kind != "W")


@pytest.mark.parametrize("half", [1, 2, 4])
def test_dualpipe_is_two_of_them_back_to_back(half: int) -> None:
    S, M = 2 * half, 5 * half
    both, cut = rows("dualpipe", opposite(S, M), {}), rows("dualpipe-v", vee(half, M), {})

    def flat(row: list[PassGroup]) -> list[tuple[tuple[str, int, int], ...]]:
        return [tuple((p.kind, p.stage, p.micro_batch) for p in group) for group in row]

    for r in range(half):
        assert flat(both[r]) == flat(both[S - 1 - r]) == flat(cut[r])
        for group in both[r]:
            assert all(p.pipeline == (p.stage >= half) for p in group)
        for group in both[S - 1 - r]:
            assert all(p.pipeline == (p.stage < half) for p in group)


def test_it_takes_few_lines() -> None:
    lines: set[int] = set()
    tree = ast.parse(inspect.getsource(dual_pipe_v))
    written = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    assert {each.name for each in written} == {"row", "rows"}
    for function in written:
        first, *_ = function.body
        assert isinstance(first, ast.Expr)  # the docstring is no line of code
        lines |= set(range(function.lineno, first.lineno)) | set(range(first.end_lineno + 1, function.end_lineno + 1))  # type: ignore[operator]
    assert 20 < len(lines) <= 63
