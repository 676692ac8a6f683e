"""The order in which the interpreter issues things, on Programs written by hand and on a real one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from runtime_cases import Case, cpu_cluster, describe, make_plan

from autopiper.errors import RuntimeFault
from autopiper.plan import Action, Group, Pipeline, Place, Program, Schedule, Stage, Strategy, Training, Wait
from autopiper.plan.actions import parse_action
from autopiper.runtime.channels import Arriving, Form, TensorForm
from autopiper.runtime.interpreter import Interpreter
from autopiper.runtime.lanes import Lanes, Pending


def program(**streams: Sequence[str]) -> Program:
    """Write a Program as "action after wait, wait@block"."""
    made = {}
    for name, lines in streams.items():
        actions = []
        for line in lines:
            text, _, waits = line.partition(" after ")
            parts = [w.partition("@") for w in waits.split(", ") if w]
            parsed = tuple(Wait(action=a, block=int(b) if b else None) for a, _, b in parts)
            actions.append(parse_action(text, stream=name, waits=parsed))
        made[name] = tuple(actions)
    return Program(ranks=(0,), devices=(0,), places=(Place(pipeline=0, stage=0, member=0),), streams=made)


class Slow(Pending):
    """Over only when somebody waits for it."""

    def __init__(self, log: list[str], text: str) -> None:
        super().__init__()
        self._log, self._text = log, text

    def finish(self, lanes: Lanes) -> None:
        self._log.append(f"wait {self._text}")
        super().finish(lanes)


def run(given: Program, passing: dict[str, Sequence[int]] | None = None) -> list[str]:
    """Run a Program on handlers that write down what happens; `passing`: the blocks that a backward passes."""
    log: list[str] = []

    def handler(action: Action) -> Pending | None:
        log.append(action.text)
        for block in (passing or {}).get(action.text, ()):
            log.append(f"pass {block}")
            interpreter.passed(action.text, block)
        return None if action.stream == "compute" else Slow(log, action.text)

    kinds = {a.kind for a in given.actions()}
    interpreter = Interpreter(given, dict.fromkeys(kinds, handler), Lanes(), rank=0)
    interpreter.run()
    return log


def test_receives_are_issued_ahead_and_waited_for_where_they_are_used() -> None:
    log = run(
        program(
            compute=["1F0 after 1RECV_F0<0[0:1]", "1F1 after 1RECV_F1<0[0:1]", "1F2 after 1RECV_F2<0[0:1]"],
            channel=["1RECV_F0<0[0:1]", "1RECV_F1<0[0:1]", "1RECV_F2<0[0:1] after 1F0"],
        )
    )
    assert log == [
        "1RECV_F0<0[0:1]", "1RECV_F1<0[0:1]", "wait 1RECV_F0<0[0:1]", "1F0", "1RECV_F2<0[0:1]",
        "wait 1RECV_F1<0[0:1]", "1F1", "wait 1RECV_F2<0[0:1]", "1F2",
    ]  # fmt: skip


def test_a_send_is_issued_right_after_its_compute_which_never_waits_for_it() -> None:
    log = run(program(compute=["0F0", "0F1"], channel=["0SEND_F0>0[0:1] after 0F0", "0SEND_F1>0[0:1] after 0F1"]))
    assert log[:4] == ["0F0", "0SEND_F0>0[0:1]", "0F1", "0SEND_F1>0[0:1]"]
    assert all(line.startswith("wait") for line in log[4:])


def test_reductions_start_inside_the_backward_that_makes_them_final() -> None:
    log = run(
        program(
            compute=["0F0", "0B0", "g0UPDATE after g0.1REDUCE_GRAD"],
            reduce0=["g0.0REDUCE_GRAD after 0B0@2", "g0.1REDUCE_GRAD after 0B0@0"],
        ),
        {"0B0": (2, 1, 0)},
    )
    assert log == [
        "0F0", "0B0", "pass 2", "g0.0REDUCE_GRAD", "pass 1", "pass 0", "g0.1REDUCE_GRAD",
        "wait g0.0REDUCE_GRAD", "wait g0.1REDUCE_GRAD", "g0UPDATE",
    ]  # fmt: skip


def test_streams_keep_their_order() -> None:
    log = run(program(compute=["0F0", "0F1"], loss=["LOSS after 0F1", "NORM after 0F0"]))
    assert log[:4] == ["0F0", "0F1", "LOSS", "NORM"]


def test_a_wait_that_can_never_be_over_is_a_fault_and_not_a_hang() -> None:
    with pytest.raises(RuntimeFault, match=r"rank 0 \(p0\.s0\.m0\): 0F1 is waited for before it can run"):
        run(program(compute=["0F0 after 0F1", "0F1"]))


def test_a_fault_names_rank_place_and_action_and_keeps_its_cause() -> None:
    def handler(action: Action) -> None:
        raise KeyError("weight")

    with pytest.raises(RuntimeFault, match=r"rank 3 \(p0\.s0\.m0\), action 0F0: KeyError: 'weight'") as fault:
        Interpreter(program(compute=["0F0"]), {"F": handler}, Lanes(), rank=3).run()
    assert isinstance(fault.value.__cause__, KeyError)


class Marks(Lanes):
    """Lanes of a device that runs on by itself: they note after what each stream begins."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.count, self.issued = 0, list[tuple[str, list[int]]]()

    def mark(self) -> int:
        self.count += 1
        return self.count

    @contextmanager
    def issue(self, stream: str, after: Sequence[int]) -> Iterator[None]:
        self.issued.append((stream, list(after)))
        yield


def test_what_waits_for_nothing_still_waits_for_the_begin_of_the_step() -> None:
    """A loss is summed over ranks that have none, too: not before the compute stream has set it to zero."""
    lanes = Marks()
    made = program(compute=["0F0", "0B0"], loss=["LOSS"], channel=["0SEND_F0>0[0:1] after 0F0"])
    Interpreter(made, dict.fromkeys(("F", "B", "LOSS", "SEND_F"), lambda _: None), lanes, rank=0).run()
    assert lanes.issued == [("loss", [1]), ("channel", [2])]


def test_a_message_is_kept_by_nobody_but_who_got_it() -> None:
    class Fake:
        device = torch.device("cpu")

        def known_form(self) -> Form:
            return form

        def post(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
            return []

    form = Form(kind="tensor", tensors=(TensorForm(shape=(3,), dtype="float32", grad=True),))
    got: list[torch.Tensor] = []
    arriving = Arriving(Fake(), 2, lambda tensors, _: got.extend(tensors))  # type: ignore[arg-type]
    arriving.post(form)
    arriving.finish(Lanes())
    message = weakref.ref(got.pop())
    assert message() is None


def test_real_reductions_overlap_the_last_backward(pool: Any) -> None:
    model, cluster = describe("llama", "fp64"), cpu_cluster(2)
    group = Group(members=((0,), (1,)), slices=((1, 3), (3, 1)))
    strategy = Strategy(
        training=Training(global_batch_size=8, precision="fp64", clip_grad_norm=1.0, optimizer="sgd-momentum"),
        pipelines=(
            Pipeline(
                micro_batch_sizes=(4, 4),
                stages=(Stage(start=0, stop=6, group=group, recompute=("none", "full") * 3),),
            ),
        ),
        schedules=(Schedule(family="1f1b", pipelines=(0,)),),
        bucket_bytes=4096,
    )
    plan = make_plan(model, cluster, strategy)
    buckets = [a.text for a in plan.programs[0].actions() if a.kind == "REDUCE_GRAD"]
    assert len(buckets) > 3
    for result in pool.run(plan, Case(module="llama", steps=2)):
        begin = {action: start for action, start, _ in result["events"]}
        end = {action: stop for action, _, stop in result["events"]}
        assert sorted(begin, key=lambda a: begin[a]).index("0F0") < 2  # the steps are told apart
        assert begin["0B0"] < end["0B0"] <= begin["0F1"] < begin["0B1"]
        assert [b for b in buckets[:-1] if not begin["0B1"] < begin[b] < end["0B1"]] == []
        order = [begin[b] for b in buckets]
        assert order == sorted(order)
        assert begin["NORM"] >= max(end["0B1"], *(end[b] for b in buckets))
        assert set(begin) == {a.text for a in plan.programs[0].actions()}
