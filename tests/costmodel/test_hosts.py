"""What a rank spends beside its blocks lengthens its passes, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopiper as ap
from autopiper.errors import CostError
from autopiper.plan.costs import HostCost

F, B = 1.0, 2.0
COSTS = ap.CostTable.from_layers(forward_s=[F] * 3, backward_s=[B] * 3)


def makespan_s(stages: int, samples: int, *hosts: HostCost) -> float:
    model, cluster = ap.Model.chain(3), ap.Cluster.local(stages, ideal=True)
    training = ap.Training(global_batch_size=samples, precision="fp32")
    strategy = ap.Strategy.uniform(model, cluster, training, pipeline_parallel_size=stages, schedule="gpipe")
    return ap.simulate(strategy, model, cluster, replace(COSTS, hosts=hosts)).makespan_s


def test_one_stage_pays_per_pass_and_sends_no_messages() -> None:
    host = HostCost(device_type="cpu", forward_s=0.1, backward_s=0.25, message_s=9.0)
    assert makespan_s(1, 4, host) == pytest.approx(4 * (3 * F + 0.1 + 3 * B + 0.25))


def test_every_pass_pays_for_its_messages() -> None:
    # One micro-batch down and up three stages of one block: each end has one message a pass, the middle two.
    host = HostCost(device_type="cpu", forward_s=0.1, backward_s=0.25, message_s=0.01)
    assert makespan_s(3, 1, host) == pytest.approx(3 * (F + 0.1 + B + 0.25) + 2 * 4 * 0.01)


def test_other_device_types_pay_nothing() -> None:
    assert makespan_s(3, 2, HostCost(device_type="elsewhere", forward_s=5.0)) == makespan_s(3, 2)


def test_tables_join_and_keep_hosts(tmp_path: object) -> None:
    a, b = (replace(COSTS, hosts=(HostCost(device_type=t, message_s=s),)) for t, s in (("a", 1.0), ("b", 2.0)))
    assert {h.device_type: h.message_s for h in a.merge(b).hosts} == {"a": 1.0, "b": 2.0}
    path = f"{tmp_path}/costs.json"
    a.merge(b).save(path)
    assert ap.CostTable.load(path).hosts == a.merge(b).hosts


def test_impossible_prices_are_refused() -> None:
    with pytest.raises(CostError, match=r"message_s of host 'a' is -1\.0; it must be zero or more and finite"):
        HostCost(device_type="a", message_s=-1.0)
