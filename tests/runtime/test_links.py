"""From the seconds of calls to latency and bandwidth, against a link that is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from autopiper.runtime import links

SEND = (2e-4, 3e9)
REDUCE = (5e-4, 1e9)


@pytest.fixture
def known_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def window(once: Any, tensor: torch.Tensor, *_: Any) -> float:
        size = tensor.numel() * tensor.element_size()
        if once.__name__ == "reduce":  # a ring of two: two rounds of half the bytes
            return 2 * (REDUCE[0] + size / 2 / REDUCE[1])
        return 2 * (SEND[0] + size / SEND[1])  # there and back

    monkeypatch.setattr(links, "_window", window)
    monkeypatch.setattr(links, "_message_s", lambda *_: 7e-4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


@pytest.mark.usefixtures("known_link")
def test_latency_and_bandwidth_of_a_known_link_are_found() -> None:
    group: Any = None
    found = links.measure_link(1, group, repeats=3)
    small_s = links.SMALL_BYTES / SEND[1]
    assert found.send_latency_s == pytest.approx(SEND[0] + small_s)
    assert found.send_bytes_per_s == pytest.approx(SEND[1], rel=1e-3)
    assert found.reduce_latency_s == pytest.approx(REDUCE[0], rel=1e-2)
    assert found.reduce_bytes_per_s == pytest.approx(REDUCE[1], rel=1e-3)
    assert found.message_s == 7e-4
    assert found.relative_error == 0.0


@pytest.mark.usefixtures("known_link")
def test_one_price_serves_both_uses_by_the_slower_bandwidth() -> None:
    group: Any = None
    cost = links.measure_link(1, group, repeats=1).cost("node")
    assert (cost.tier, cost.evidence) == ("node", "measured")
    assert cost.bytes_per_s == pytest.approx(min(SEND[1], REDUCE[1]), rel=1e-3)
    assert math.isclose(cost.latency_s, SEND[0], rel_tol=1e-2)
