"""1F1B (PipeDream-flush; Narayanan et al., arXiv 2104.04473, section 2.2.1)."""

from __future__ import annotations

from autopiper.ir.graph import Pass


def order(stage: int, num_stages: int, num_micro_batches: int) -> list[Pass]:
    """Warm up with num_stages - 1 - stage forwards, then alternate; at most num_stages - stage micro-batches are live.

    Bubble of equal stages: (num_stages - 1)(F + B), as GPipe's.
    """
    warmup = min(num_stages - 1 - stage, num_micro_batches)
    passes = [Pass(kind="F", micro_batch=m) for m in range(warmup)]
    for m in range(num_micro_batches - warmup):
        passes += [Pass(kind="F", micro_batch=warmup + m), Pass(kind="B", micro_batch=m)]
    return passes + [Pass(kind="B", micro_batch=m) for m in range(num_micro_batches - warmup, num_micro_batches)]
