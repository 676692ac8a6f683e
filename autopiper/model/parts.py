"""What a Model is made of: blocks, the tensors on their edges, tied parameters.

Counts are per *sample* (one sequence of `Model.sequence_length` tokens for language models) and in *elements* where
the bytes depend on the precision, which is not the model's business but `Training`'s.
"""

from __future__ import annotations

import math

from autopiper._data import data
from autopiper.errors import ModelError

ONE_SEGMENT = ("all",)
"""Segments of a block without routed experts."""

EXPERT_SEGMENTS = ("dense", "experts")
"""Segments of a block with routed experts: attention, router and shared experts, then the routed experts."""


@data
class TensorSpec:
    """One tensor of one sample: its shape leaves the batch dimension out."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "activation"
    """"activation" = the floating type that `Training.precision` gives; otherwise a torch name such as "int64"."""

    @property
    def elements(self) -> int:
        """Elements of one sample."""
        return math.prod(self.shape)

    def bytes(self, activation_bytes: float) -> float:
        """Bytes of one sample, `activation_bytes` being those of one activation element."""
        fixed = {"int64": 8, "int32": 4, "bool": 1, "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
        return self.elements * fixed.get(self.dtype, activation_bytes)


@data
class Block:
    """The smallest unit of assignment to a stage: one layer, embedding or head, with its parameters."""

    name: str
    kind: str
    """Blocks of one kind are equal in everything but their name, and are priced once."""
    dense_parameters: int = 0
    """Parameters that every replica holds, tied ones included."""
    expert_parameters: int = 0
    """Parameters of routed experts, which expert parallelism divides."""
    replicated_parameters: int = 0
    """Of the dense ones, those that every tensor-parallel rank holds whole (norms, routers)."""
    forward_flops: float = 0.0
    """Matrix work of one forward, 2 FLOP per multiply-add."""
    backward_input_flops: float = 0.0
    """Matrix work of the gradient for the input (I)."""
    backward_weight_flops: float = 0.0
    """Matrix work of the gradient for the weights (W)."""
    forward_moved_elements: float = 0.0
    """Activation elements read and written by the memory-bound operations of one forward."""
    kernels: int = 1
    """Kernel launches of one forward, whatever the number of samples."""
    kept_elements: float = 0.0
    """Elements kept from F to B (or W) without recompute, in the training precision."""
    kept_elements_selective: float = 0.0
    """The same under selective recompute (the attention core is computed again)."""
    kept_replicated_elements: float = 0.0
    """Of the kept ones, those that tensor parallelism does not divide unless sequence parallelism does."""
    kept_fp32_elements: float = 0.0
    """Elements kept in fp32 whatever the precision (logits for the loss)."""
    tensor_divisors: tuple[tuple[str, int], ...] = ()
    """Named counts that a tensor-parallel size must divide, e.g. (("num_attention_heads", 32),)."""
    tensor_collectives: int = 0
    """All-reduces among tensor-parallel ranks in one forward; a backward has as many."""
    tensor_collective_elements: float = 0.0
    """Elements that they sum in one forward, all together."""
    num_experts: int = 0
    """Routed experts that expert parallelism can share out; 0 = none, 1 = not to be told apart."""
    expert_forward_flops: float = 0.0
    """Of `forward_flops`, the work of the routed experts; so the three below."""
    expert_backward_input_flops: float = 0.0
    expert_backward_weight_flops: float = 0.0
    expert_moved_elements: float = 0.0
    """Of `forward_moved_elements`: activations of the experts, tokens permuted to them and back."""
    expert_kernels: int = 0
    """Of `kernels`, those of the routed experts."""
    all_to_all_elements: float = 0.0
    """Activation elements per sample that one all-to-all carries (the dispatch to the experts, or the combination of
    their results): experts_per_token * sequence_length * hidden_size."""
    segments: tuple[str, ...] = ONE_SEGMENT
    """Parts between which an all-to-all may stand: ("all",), or ("dense", "experts") where `num_experts` > 0."""

    def __post_init__(self) -> None:
        for field in (
            "dense_parameters", "expert_parameters", "replicated_parameters", "forward_flops",
            "backward_input_flops", "backward_weight_flops", "forward_moved_elements", "kernels", "kept_elements",
            "kept_elements_selective", "kept_replicated_elements", "kept_fp32_elements", "num_experts",
            "expert_forward_flops", "expert_backward_input_flops", "expert_backward_weight_flops",
            "expert_moved_elements", "expert_kernels", "all_to_all_elements",
        ):  # fmt: skip
            value = getattr(self, field)
            if not (value >= 0 and math.isfinite(value)):
                raise ModelError(f"block '{self.name}': {field} is {value}; it must be zero or more and finite")
        self._check_experts()

    def _check_experts(self) -> None:
        right = EXPERT_SEGMENTS if self.num_experts else ONE_SEGMENT
        if self.segments != right:
            raise ModelError(
                f"block '{self.name}': segments is {self.segments} with num_experts {self.num_experts}; allowed: "
                f"{ONE_SEGMENT} without experts, {EXPERT_SEGMENTS} with one or more"
            )
        for part, whole in (
            ("expert_forward_flops", "forward_flops"),
            ("expert_backward_input_flops", "backward_input_flops"),
            ("expert_backward_weight_flops", "backward_weight_flops"),
            ("expert_moved_elements", "forward_moved_elements"),
            ("expert_kernels", "kernels"),
        ):
            most = getattr(self, whole) if self.num_experts else 0
            if getattr(self, part) > most:
                reason = f"{whole}, of which it is a part, is {most}" if self.num_experts else "num_experts is 0"
                raise ModelError(f"block '{self.name}': {part} is {getattr(self, part)}, but {reason}")
        if self.all_to_all_elements and not self.num_experts:
            raise ModelError(
                f"block '{self.name}': all_to_all_elements is {self.all_to_all_elements}, but num_experts is 0"
            )

    @property
    def parameters(self) -> int:
        """All parameters of the block."""
        return self.dense_parameters + self.expert_parameters


@data
class Edge:
    """What `target` reads of the output of `source` (block indices, source < target)."""

    source: int
    target: int
    tensors: tuple[TensorSpec, ...]


@data
class TiedParameter:
    """One parameter used by several blocks; each of them counts it in `dense_parameters`."""

    name: str
    blocks: tuple[int, ...]
    parameters: int
