"""The pictures of docs/schedules.md: one step of every schedule family, four ranks, drawn from simulated timelines.

python experiments/pictures.py         (what `make pictures` runs)
"""

from __future__ import annotations

import sys
from pathlib import Path

import autopiper as ap
from autopiper.ir.schedules import FAMILIES
from autopiper.plan.file import write_text
from autopiper.report.picture import picture

RANKS, MICRO_BATCHES, BLOCKS = 4, 10, 8
FOLDER = Path(__file__).resolve().parents[1] / "docs/pictures"


def drawn(family: str) -> str:
    """Eight equal blocks at F = I = W over four ranks with free links; dualpipe gets as many micro-batches a direction."""
    model, cluster = ap.Model.chain(BLOCKS), ap.Cluster.local(num_devices=RANKS, ideal=True)
    costs = ap.CostTable.from_layers(
        forward_s=[1.0] * BLOCKS, backward_input_s=[1.0] * BLOCKS, backward_weight_s=[1.0] * BLOCKS
    )
    strategy = ap.Strategy.uniform(
        model, cluster, ap.Training(global_batch_size=MICRO_BATCHES * FAMILIES[family].num_pipelines),
        pipeline_parallel_size=RANKS, schedule=family,
        virtual_pipeline_parallel_size=2 if FAMILIES[family].stage_map == "loop" else 1,
    )  # fmt: skip
    timeline = ap.simulate(strategy, model, cluster, costs)
    return picture(
        timeline,
        title=f"{family}: {timeline.makespan_s:g} s, bubble {timeline.bubble_fraction:.1%}",
        communication=False,
    )


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    for family in FAMILIES:
        path = FOLDER / f"{family}.svg"
        write_text(path, drawn(family))
        print(path.name, path.stat().st_size, "bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
