"""Seconds of every node of the joint graph, from the cost table: what the simulator adds up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopiper.cluster.spec import Device
from autopiper.costmodel.collectives import all_reduce_s, transfer_s
from autopiper.costmodel.memory import boundary_bytes
from autopiper.ir.graph import GradientBlock, GraphStage, TrainingGraph
from autopiper.ir.joint import Joint, Node
from autopiper.plan.actions import Place, Program
from autopiper.plan.costs import BlockCost, CostTable

SCALARS_BYTES = 16
"""LOSS sums a loss and a weight, NORM a square and a flag, in float64."""


class Durations:
    """Prices the nodes of one joint graph; equal stages, slices and messages are priced once."""

    def __init__(self, graph: TrainingGraph, programs: Sequence[Program], costs: CostTable) -> None:
        self.graph, self.programs, self.costs = graph, programs, costs
        self.prices = costs.index()
        self.hosts = {host.device_type: host for host in costs.hosts}
        self.devices: tuple[Device, ...] = graph.cluster.devices()
        self.weighted_error_s = 0.0
        self.compute_s = 0.0
        self._passes: dict[tuple[object, ...], tuple[float, float, list[float]]] = {}
        self._messages: dict[tuple[object, ...], float] = {}
        self._reductions: dict[tuple[int, int], float] = {}
        self._members_on = {
            (s.pipeline, s.index): Counter(self.devices[m[0]].node for m in s.members) for s in graph.stages()
        }
        self._crossing = self._crossing_holder_sets()

    @property
    def relative_error(self) -> float:
        """Of the prices used so far, weighted by their seconds."""
        return self.weighted_error_s / self.compute_s if self.compute_s else 0.0

    def block_prices(self, stage: GraphStage, member: int, samples: int) -> list[BlockCost]:
        """Return the price of each block of a stage for a slice on one of its members."""
        device_type = self.devices[stage.members[member][0]].type.name
        return [
            self.prices.block(b.kind, device_type, stage.tensor_parallel_size, samples)
            for b in self.graph.model.blocks[stage.start : stage.stop]
        ]

    def compute(self, kind: str, stage: GraphStage, member: int, samples: int) -> tuple[float, float, list[float]]:
        """Return (seconds, of them recompute, below) of F, B, I or W.

        `below[i]` = seconds that a backward still needs once it has passed block `stage.start + i`.
        """
        device_type = self.devices[stage.members[member][0]].type.name
        key = (kind, stage.pipeline, stage.index, device_type, samples)
        found = self._passes.get(key)
        if found is None:
            prices = self.block_prices(stage, member, samples)
            field = {"F": "forward_s", "B": "backward_s", "I": "backward_input_s", "W": "backward_weight_s"}[kind]
            again = [0.0] * len(prices)
            if kind in ("B", "I"):  # what is computed again is computed before the first backward work
                again = [
                    {"none": 0.0, "selective": price.selective_forward_s, "full": price.forward_s}[choice]
                    for price, choice in zip(prices, stage.recompute, strict=True)
                ]
            seconds = [getattr(price, field) + more for price, more in zip(prices, again, strict=True)]
            beside_s = self._beside_s(kind, stage, device_type)
            below = [0.0]
            for value in seconds[:-1]:
                below.append(below[-1] + value)
            found = self._passes[key] = (sum(seconds) + beside_s, sum(again), below)
            self.weighted_error_s += sum(s * p.relative_error for s, p in zip(seconds, prices, strict=True))
            self.compute_s += found[0]
        return found

    def _beside_s(self, kind: str, stage: GraphStage, device_type: str) -> float:
        """What the host spends on one pass beside the blocks; spent before the first block, so that none is late."""
        host = self.hosts.get(device_type)
        if host is None:
            return 0.0
        neighbours = (stage.index > 0) + (stage.index < len(self.graph.pipelines[stage.pipeline].stages) - 1)
        own_s = {"F": host.forward_s, "B": host.backward_s, "I": host.backward_s}.get(kind, 0.0)
        return own_s + (0.0 if kind == "W" else neighbours * host.message_s)

    def of_pass(self, node: Node) -> tuple[float, float, list[float]]:
        """Return what `compute` says of a node that is F, B, I or W."""
        place = self.programs[node.programs[0]].places[0]
        stage = self.graph.stage(place)
        samples = stage.slices[node.actions[0].micro_batch or 0][place.member]
        return self.compute(node.kind, stage, place.member, samples)

    def seconds(self, node: Node) -> float:
        """Return the duration of a node once it has started."""
        if node.kind in ("F", "B", "I", "W"):
            return self.of_pass(node)[0]
        action = node.actions[0]
        place = self.programs[node.programs[0]].places[0]
        if node.kind == "TRANSFER":
            low, high = action.samples or (0, 0)
            return self._transfer(self.graph.stage(place), place, node.actions[0].kind, action.peer or 0, high - low)
        if node.kind == "REDUCE_GRAD":
            return self._reduction(action.gradient_block or 0, action.bucket or 0)
        if node.kind == "UPDATE":
            return self._update(self.graph.gradient_blocks[action.gradient_block or 0], place)
        return all_reduce_s(self.costs, self.graph.cluster, self.graph.devices(), SCALARS_BYTES)

    def _transfer(self, stage: GraphStage, place: Place, kind: str, peer: int, samples: int) -> float:
        """One message, each tensor-parallel rank carrying its part (scatter, arXiv 2104.04473, section 4.1).

        Members of one stage work in step, so those that leave a node share its interfaces.
        """
        step = 1 if kind == "SEND_F" else -1
        other = self.graph.pipelines[stage.pipeline].stages[stage.index + step]
        a, b = stage.members[place.member][0], other.members[peer][0]
        key = (stage.pipeline, stage.index, kind, a, b, samples)
        if key not in self._messages:
            cut = max(stage.start, other.start)
            width = min(stage.tensor_parallel_size, other.tensor_parallel_size)
            part = boundary_bytes(self.graph.model, self.graph.training, self.costs, cut) * samples / width
            nodes = (self.devices[a].node, self.devices[b].node)
            if nodes[0] != nodes[1]:
                ends = zip((stage, other), nodes, strict=True)
                part *= max(
                    1.0,
                    *(
                        self._members_on[s.pipeline, s.index][n] * width / self.graph.cluster.nodes[n].nics
                        for s, n in ends
                    ),
                )
            self._messages[key] = transfer_s(self.costs, self.graph.cluster, a, b, part)
        return self._messages[key]

    def _crossing_holder_sets(self) -> Counter[int]:
        """Count per node the holder sets that reach beyond it: at the end of a step they share its interfaces."""
        found: Counter[int] = Counter()
        for holders in {b.holders for b in self.graph.gradient_blocks if len(b.holders) > 1}:
            nodes = {self.devices[self.graph.stage(p).members[p.member][0]].node for p in holders}
            if len(nodes) > 1:
                found.update(nodes)
        return found

    def _reduction(self, block: int, bucket: int) -> float:
        """All-reduce of one bucket, each tensor-parallel rank its shard.

        Pessimistic where reductions of a node do not start together: each is given an equal part of the interfaces.
        """
        gradient_block = self.graph.gradient_blocks[block]
        piece = gradient_block.buckets[bucket]
        key = (block, piece.stop - piece.start)
        if key not in self._reductions:
            stages = [self.graph.stage(p) for p in gradient_block.holders]
            width = min(s.tensor_parallel_size for s in stages)
            firsts = [s.members[p.member][0] for s, p in zip(stages, gradient_block.holders, strict=True)]
            sharing = max(self._crossing[self.devices[d].node] for d in firsts) or 1
            self._reductions[key] = all_reduce_s(
                self.costs,
                self.graph.cluster,
                firsts,
                key[1] * self.graph.training.gradient_bytes / width,
                sharing=sharing * width,
            )
        return self._reductions[key]

    def _update(self, block: GradientBlock, place: Place) -> float:
        stage = self.graph.stage(place)
        device_type = self.devices[stage.members[place.member][0]].type.name
        model = self.graph.model
        held = [b for b in block.blocks if stage.start <= b < stage.stop]
        total = 0.0
        for b in held[-1:] if block.kind == "tied" else held:
            spec = model.blocks[b]
            price = self.prices.curve(spec.kind, device_type, stage.tensor_parallel_size)[0]
            own = block.elements if block.kind == "tied" else model.untied_parameters(b)
            total += price.update_s * (own / spec.parameters if spec.parameters else 1.0)
        return total

    def all(self, joint: Joint) -> list[float]:
        """Return the seconds of every node."""
        return [self.seconds(node) for node in joint.nodes]
