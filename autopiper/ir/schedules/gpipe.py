"""GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards, last micro-batch first."""

from __future__ import annotations

from autopiper.ir.graph import Pass


def order(stage: int, num_stages: int, num_micro_batches: int) -> list[Pass]:
    """Bubble of equal stages: (num_stages - 1)(F + B); every micro-batch is live at once."""
    forwards = [Pass(kind="F", micro_batch=m) for m in range(num_micro_batches)]
    return forwards + [Pass(kind="B", micro_batch=m) for m in reversed(range(num_micro_batches))]
