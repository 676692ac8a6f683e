"""Training: how the weights are trained. The one owner of precision, optimizer and bytes per parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from autopiper._data import data, require_fields
from autopiper.cluster.spec import DeviceType
from autopiper.errors import PlanError, nearest

PREFERENCE = ("bf16", "fp16", "tf32", "fp32", "fp64")
"""What `precision=None` tries, best first; lower precisions are chosen by a person, never silently."""
ACTIVATION_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd-momentum": 1, "sgd": 0}
"""Optimizer states per parameter, each in the precision of the master weights."""
_LONG_NAMES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
"""What other libraries call the precisions, for the message."""
STATE_LAYOUTS = ("mixed", "ornl-16")


@data
class Training:
    """Batch, precision, optimizer and clipping."""

    global_batch_size: int
    """Samples of one optimizer step, over all pipelines."""
    precision: str | None = None
    """"fp64", "fp32", "tf32", "bf16" or "fp16"; None = the best that all used devices support (`resolve`)."""
    optimizer: str = "adamw"
    """"adamw", "adam", "sgd-momentum" or "sgd"."""
    clip_grad_norm: float | None = None
    """Clip the gradient to this global 2-norm; None = no clipping, and no barrier at the end of a step."""
    state_layout: str = "mixed"
    """"mixed": 16-bit weights, fp32 gradients and master weights; "ornl-16": 16-bit gradients (arXiv 2605.05049)."""
    precision_reason: str = "given"
    """Why this precision, in words."""

    def __post_init__(self) -> None:
        require_fields(self, PlanError)
        if self.global_batch_size < 1:
            raise PlanError(f"global_batch_size is {self.global_batch_size}; it must be 1 or more")
        if self.precision is not None and self.precision not in ACTIVATION_BYTES:
            raise PlanError(
                f"precision '{self.precision}' cannot be trained in"
                f"{nearest(_LONG_NAMES.get(self.precision, self.precision), ACTIVATION_BYTES)}; "
                f"allowed: {', '.join(ACTIVATION_BYTES)}, or None"
            )
        if self.optimizer not in OPTIMIZER_STATES:
            raise PlanError(
                f"optimizer '{self.optimizer}' is unknown{nearest(self.optimizer, OPTIMIZER_STATES)}; "
                f"allowed: {', '.join(OPTIMIZER_STATES)}"
            )
        if self.clip_grad_norm is not None and not (self.clip_grad_norm > 0 and math.isfinite(self.clip_grad_norm)):
            raise PlanError(f"clip_grad_norm is {self.clip_grad_norm}; it must be above zero, or None")
        if self.state_layout not in STATE_LAYOUTS:
            raise PlanError(f"state_layout '{self.state_layout}' is unknown; allowed: {', '.join(STATE_LAYOUTS)}")

    def resolve(self, device_types: Iterable[DeviceType]) -> Training:
        """Return this training with a precision that all `device_types` support, and why it was chosen.

        Raises PlanError where a device does not support the precision asked for.
        """
        types = {t.name: t for t in device_types}
        if self.precision is not None:
            lacking = [name for name, t in types.items() if not t.supports(self.precision)]
            if lacking:
                able = [p for p in PREFERENCE if all(t.supports(p) for t in types.values())]
                raise PlanError(
                    f"precision '{self.precision}' is not supported by {', '.join(lacking)}; all used devices support: "
                    f"{', '.join(able) or 'none in common'}"
                )
            return self
        for position, precision in enumerate(PREFERENCE):
            lacking = [name for name, t in types.items() if not t.supports(precision)]
            if not lacking:
                better = [
                    f"{p} is not supported by {', '.join(n for n, t in types.items() if not t.supports(p))}"
                    for p in PREFERENCE[:position]
                ]
                reason = (
                    f"best that all used devices support ({'; '.join(better)})"
                    if better
                    else "best precision, supported by all used devices"
                )
                if precision == "fp16":
                    reason += "; with dynamic loss scaling"
                return replace(self, precision=precision, precision_reason=reason)
        raise PlanError(f"the devices {', '.join(types)} have no precision in common; train on fewer kinds of them")

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation element. Raises PlanError while the precision is open."""
        if self.precision is None:
            raise PlanError("precision is still None; call Training.resolve(device_types) first")
        return ACTIVATION_BYTES[self.precision]

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight as computed with."""
        return self.activation_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one accumulated gradient, and of what is reduced."""
        if self.state_layout == "ornl-16":
            return self.activation_bytes
        return max(4, self.activation_bytes)

    @property
    def master_bytes(self) -> int:
        """Bytes of the fp32 master copy; none where the weights are already that wide."""
        return 4 if self.activation_bytes < 4 else 0

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer states of one parameter."""
        return OPTIMIZER_STATES[self.optimizer] * max(4, self.activation_bytes)

    @property
    def bytes_per_parameter(self) -> int:
        """All resident bytes of one parameter: bf16 with AdamW 2 + 4 + 4 + 8 = 18, ornl-16 = 16, fp32 = 16."""
        return self.weight_bytes + self.gradient_bytes + self.master_bytes + self.optimizer_bytes

    @property
    def needs_norm(self) -> bool:
        """Whether a step ends with a global barrier: clipping, or the finite check of fp16's loss scaling."""
        return self.clip_grad_norm is not None or self.precision == "fp16"
