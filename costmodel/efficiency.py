"""How much of its data sheet a device reaches: matrix kernels by their size, memory-bound kernels flatly.

Large matrix products: the best that anyone measured on the device as a share of its dense peak, bf16 or fp16 (the
"maximum achievable matmul FLOPS" tables of S. Bekman, Machine Learning Engineering, compute/accelerator, 2024-2026).
Small ones: each kernel pays a fixed time for ramp-up and for its last, partly filled wave, so that a kernel whose work
takes t at the best rate reaches t / (t + fixed) of it (the shape of Hockney's n-half curve, 1982).
The constants are not fitted to any training run.
"""

from __future__ import annotations

from autopiper.cluster.spec import DeviceType
from autopiper.errors import CostError

_BEST_SHARE = {
    "a100": 0.86, "h100": 0.80, "h200": 0.80, "gh200": 0.83, "b200": 0.78, "b300": 0.78, "gb200": 0.78, "gb300": 0.78,
    "mi250x": 0.77, "mi300x": 0.60,
}  # fmt: skip
"""By the first word of the device type's name. B300, GB200, GB300: taken to be as B200, of the same generation."""

OTHER_SHARE = 0.80
"""Devices that nobody measured for us: the middle of the table above (assumption)."""

TRAINING_SHARE = 0.80
"""Of the best shape's rate, what the shapes of a layer reach on average: not every dimension is a multiple of the
tile, and attention and transposed products are slower (Anthony et al., arXiv 2401.14489, figures 5 to 9; assumption)."""

RAMP_S = 6e-6
"""Ramp-up and last wave of one matrix kernel on a GPU: a 1024-cube product takes about twice its ideal 7 us on an
A100 (assumption; a curve measured per device replaces it)."""

MEMORY_SHARE = 0.85
"""Of the data sheet's memory bandwidth, what copies and elementwise kernels reach: 0.85 to 0.91 on HBM (BabelStream)."""


def best_share(device: DeviceType) -> float:
    """Return the share of its dense peak that a device reaches on large layers."""
    return _BEST_SHARE.get(device.name.split("-")[0].lower(), OTHER_SHARE) * TRAINING_SHARE


def matmul_s(device: DeviceType, precision: str, flops: float, kernels: float) -> float:
    """Return the seconds of matrix work of `flops` spread over `kernels` equal kernels; 0 for no work.

    Raises CostError where the device does not compute in `precision`.
    """
    if precision not in device.peak_flops:
        raise CostError(
            f"device type '{device.name}' does not support precision '{precision}'; "
            f"allowed: {', '.join(device.peak_flops)}"
        )
    if flops == 0:
        return 0.0
    ramp_s = 0.0 if device.platform == "cpu" else RAMP_S * kernels
    return flops / (device.peak_flops[precision] * best_share(device)) + ramp_s


def moved_s(device: DeviceType, num_bytes: float) -> float:
    """Return the seconds that a device takes to read and write `num_bytes` of its own memory, all together."""
    return num_bytes / (device.memory_bytes_per_s * MEMORY_SHARE)
