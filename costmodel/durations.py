"""Seconds of every node of the joint graph, and the links that it shares, from the cost table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopiper.cluster.spec import Device
from autopiper.costmodel.memory import boundary_bytes
from autopiper.costmodel.network import Network, Use
from autopiper.ir.graph import GradientBlock, GraphStage, TrainingGraph
from autopiper.ir.joint import Node
from autopiper.plan.actions import COMPUTE_KINDS, EXCHANGE_KINDS, Action, Program
from autopiper.plan.costs import BlockCost, CostTable

SCALARS_BYTES = 16
"""LOSS sums a loss and a weight, NORM a square and a flag, in float64."""
FIELDS = {"F": "forward_s", "B": "backward_s", "I": "backward_input_s", "W": "backward_weight_s"}

Seconds = tuple[float, float, tuple[float, ...]]
"""(seconds of a pass, of them recompute, `below`: per half block of it, what is left once it has been passed)."""


class Durations:
    """Prices the nodes of one joint graph; equal stages, slices and messages are priced once."""

    def __init__(self, graph: TrainingGraph, programs: Sequence[Program], costs: CostTable) -> None:
        self.graph, self.programs, self.costs = graph, programs, costs
        self.prices = costs.index()
        self.hosts = {host.device_type: host for host in costs.hosts}
        self.devices: tuple[Device, ...] = graph.cluster.devices()
        self.network = Network(costs, graph.cluster, self._alike())
        self.weighted_error_s = 0.0
        self.compute_s = 0.0
        self._passes: dict[tuple[object, ...], Seconds] = {}
        self._known: dict[tuple[object, ...], tuple[float, list[Use]]] = {}
        self._beside = [self._on_my_node(p) for p in programs]

    @property
    def relative_error(self) -> float:
        """Of the prices used so far, weighted by their seconds."""
        return self.weighted_error_s / self.compute_s if self.compute_s else 0.0

    def _alike(self) -> dict[int, int]:
        """Return for each node the first of those that are alike: with equally many ranks of each Program, copies included.

        Of equal replicas one is walked; what the others ask of its nodes, it asks of theirs.
        """
        held: dict[int, Counter[int]] = {}
        for number, program in enumerate(self.programs):
            for devices in (program.devices, *(copy.devices for copy in program.copies)):
                held.setdefault(self.devices[devices[0]].node, Counter())[number] += 1
        first: dict[object, int] = {}
        nodes = self.graph.cluster.nodes
        return {
            at: first.setdefault((tuple(sorted(count.items())), nodes[at].intra, nodes[at].nic, nodes[at].nics), at)
            for at, count in sorted(held.items())
        }

    def _on_my_node(self, program: Program) -> int:
        """Count the equal members on the node of a Program: what it sends, they send at the same time."""
        node = self.devices[program.devices[0]].node
        return 1 + sum(self.devices[copy.devices[0]].node == node for copy in program.copies)

    def stage_of(self, action: Action) -> GraphStage:
        """Return the stage that a compute, message or all-to-all is of."""
        return self.graph.stage(action.pipeline, action.stage or 0)

    def block_prices(self, stage: GraphStage, member: int, samples: int) -> list[BlockCost]:
        """Return the price of each block of a stage for a slice on one of its members."""
        device_type = self.devices[stage.members[member][0]].type.name
        return [
            self.prices.block(b.kind, device_type, stage.tensor_parallel_size, samples)
            for b in self.graph.model.blocks[stage.start : stage.stop]
        ]

    def compute(self, kind: str, stage: GraphStage, member: int, samples: int, segment: int = 0) -> Seconds:
        """Return what F, B, I or W of one segment takes; W takes the whole stage at once.

        As the runtime works: nobody needs the gradient of a first stage's input, so there I is nothing and W the whole
        backward (but where I exchanges tokens); and what is recomputed is recomputed in I and in W, the blocks of W
        going backward as a whole.
        """
        device_type = self.devices[stage.members[member][0]].type.name
        key = (kind, stage.pipeline, stage.index, segment, device_type, samples)
        found = self._passes.get(key)
        if found is None:
            low, high = (2 * stage.start, 2 * stage.stop) if kind == "W" else stage.segment(segment)
            seconds, again, error_s = [], 0.0, 0.0
            prices = self.block_prices(stage, member, samples)
            for half in range(low, high):
                price, choice = prices[half // 2 - stage.start], stage.recompute[half // 2 - stage.start]
                work = kind
                if stage.index == 0 and not stage.sharded and kind in "IW":
                    work = {"I": "", "W": "B"}[kind]
                elif kind == "W" and choice != "none":
                    work = "B"
                own_s = _half_s(price, FIELDS[work], half) if work else 0.0
                more_s = 0.0
                if work and kind != "F":  # what is computed again is computed before the first backward work
                    more_s = {
                        "none": 0.0, "full": _half_s(price, "forward_s", half),
                        "selective": 0.0 if half % 2 else price.selective_forward_s,
                    }[choice]  # fmt: skip
                seconds.append(own_s + more_s)
                again += more_s
                error_s += (own_s + more_s) * price.relative_error
            below = [0.0]
            for value in seconds[:-1]:
                below.append(below[-1] + value)
            total_s = sum(seconds) + self._beside_s(kind, stage, device_type, segment)
            found = self._passes[key] = (total_s, again, tuple(below))
            self.weighted_error_s += error_s
            self.compute_s += total_s
        return found

    def _beside_s(self, kind: str, stage: GraphStage, device_type: str, segment: int) -> float:
        """What the host spends on one pass beside the blocks; spent before its first block, so that none is late."""
        host = self.hosts.get(device_type)
        first = segment == (0 if kind in ("F", "W") else stage.num_segments - 1)
        if host is None or not first:
            return 0.0
        stages = self.graph.pipelines[stage.pipeline].stages
        neighbours = sum(
            stages[n].members != stage.members for n in (stage.index - 1, stage.index + 1) if 0 <= n < len(stages)
        )
        own_s = {"F": host.forward_s, "B": host.backward_s, "I": host.backward_s}.get(kind, 0.0)
        return own_s + (0.0 if kind == "W" else neighbours * host.message_s)

    def of_pass(self, node: Node) -> Seconds:
        """Return what `compute` says of a node that is F, B, I or W."""
        action = node.actions[0]
        stage, member = self.stage_of(action), self.programs[node.programs[0]].member
        samples = stage.slices[action.micro_batch or 0][member]
        return self.compute(node.kind, stage, member, samples, action.segment)

    def left_s(self, node: Node, block: int) -> float:
        """Return the seconds from the moment a backward has passed a block (its dense half) to its end."""
        action = node.actions[0]
        stage = self.stage_of(action)
        low = 2 * stage.start if node.kind == "W" else stage.segment(action.segment)[0]
        below = self.of_pass(node)[2]
        return below[min(max(0, 2 * block - low), len(below) - 1)]

    def node(self, node: Node) -> tuple[float, list[Use]]:
        """Return the seconds of a node once it has started, when alone, and what it asks of shared links."""
        action = node.actions[0]
        if node.kind in COMPUTE_KINDS:
            return self.of_pass(node)[0], []
        if node.kind == "TRANSFER":
            return self._transfer(node)
        if node.kind in EXCHANGE_KINDS:
            return self._exchange(node)
        if node.kind == "REDUCE_GRAD" or node.kind.startswith("UNSHARD"):
            return self._of_bucket(node)
        if node.kind == "UPDATE":
            return self._update_s(self.graph.gradient_blocks[action.gradient_block or 0], node.programs[0]), []
        if node.kind in ("LOSS", "NORM"):
            key: tuple[object, ...] = (node.kind,)
            if key not in self._known:
                everyone = self.graph.devices()
                self._known[key] = self.network.collective("all_reduce", everyone, (), SCALARS_BYTES)
            return self._known[key]
        return 0.0, []  # RESHARD lets memory go

    def _transfer(self, node: Node) -> tuple[float, list[Use]]:
        """One message, each tensor-parallel rank carrying its part (scatter, arXiv 2104.04473, section 4.1)."""
        action = node.actions[0]
        stage = self.stage_of(action)
        other = self.graph.stage(stage.pipeline, stage.index + (1 if action.kind == "SEND_F" else -1))
        sender, receiver = node.programs[0], node.programs[-1]
        low, high = action.samples or (0, 0)
        a, b = self.programs[sender].devices[0], self.programs[receiver].devices[0]
        key = ("transfer", a, b, stage.pipeline, max(stage.start, other.start), high - low)
        if key not in self._known:
            width = min(stage.tensor_parallel_size, other.tensor_parallel_size)
            cut = max(stage.start, other.start)
            part = boundary_bytes(self.graph.model, self.graph.training, self.costs, cut) * (high - low) / width
            self._known[key] = self.network.message(
                a, b, part, width=width, leaving=self._beside[sender], arriving=self._beside[receiver]
            )
        return self._known[key]

    def _exchange(self, node: Node) -> tuple[float, list[Use]]:
        """All-to-all of the tokens of one block among the members that divide its experts.

        Balanced routing: each member gives away its own tokens evenly; the fullest slice counts. Under full recompute
        the forward exchange is done once more in the backward.
        """
        action = node.actions[0]
        stage, member = self.stage_of(action), self.programs[node.programs[0]].member
        size = stage.expert_parallel_size
        first = member // size * size
        block = stage.borders[action.segment - 1].exchange or 0
        samples = max(stage.slices[action.micro_batch or 0][first : first + size])
        again = node.kind == "A2A_B" and stage.recompute[block - stage.start] == "full"
        key = ("exchange", stage.pipeline, stage.index, first, block, samples, again)
        if key not in self._known:
            tp = stage.tensor_parallel_size
            elements = self.graph.model.blocks[block].all_to_all_elements * samples / tp
            devices = [stage.members[m][0] for m in range(first, first + size)]
            present = [self.programs[p].devices[0] for p in node.programs]
            # Equal groups that are not walked themselves exchange at the same time.
            copied = {copy.member // size * size for copy in self.programs[node.programs[0]].copies} - {first}
            others = [[stage.members[m][0] for m in range(at, at + size)] for at in sorted(copied)]
            seconds, uses = self.network.exchange(
                devices, present, elements * self.graph.training.activation_bytes, width=tp, others=others
            )
            self._known[key] = (2 * seconds if again else seconds, uses)
        return self._known[key]

    def _of_bucket(self, node: Node) -> tuple[float, list[Use]]:
        """Reduction or gather of one bucket, each tensor-parallel rank its shard."""
        action = node.actions[0]
        block = self.graph.gradient_blocks[action.gradient_block or 0]
        piece = block.buckets[action.bucket or 0]
        gather = node.kind != "REDUCE_GRAD"
        key = (block.index, piece.stop - piece.start, gather)
        if key not in self._known:
            stages = [self.graph.stage(p.pipeline, p.stage) for p in block.holders]
            width = min(s.tensor_parallel_size for s in stages)
            firsts = [s.members[p.member][0] for s, p in zip(stages, block.holders, strict=True)]
            training = self.graph.training
            each = training.weight_bytes if gather else training.gradient_bytes
            self._known[key] = self.network.collective(
                "all_gather" if gather else "reduce_scatter" if block.zero else "all_reduce",
                firsts, [self.programs[p].devices[0] for p in node.programs],
                (piece.stop - piece.start) * each / width, width=width, rings=self._equal_rings(node, set(firsts)),
            )  # fmt: skip
        return self._known[key]

    def _equal_rings(self, node: Node, ring: set[int]) -> dict[int, int]:
        """Count through each node a ring and its equals, those of copies: the parts of the experts have a ring each."""
        through: dict[int, set[int]] = {}
        for program in (self.programs[p] for p in node.programs):
            for number, copy in enumerate(program.copies):
                if copy.devices[0] not in ring:
                    through.setdefault(self.devices[copy.devices[0]].node, set()).add(number)
            through.setdefault(self.devices[program.devices[0]].node, set()).add(-1)
        return {at: len(found) for at, found in through.items()}

    def _update_s(self, block: GradientBlock, program: int) -> float:
        """Optimizer step of one gradient block on one holder: of all of it, or of its part under ZeRO."""
        places = {(p.pipeline, p.stage) for p in self.programs[program].places}
        held_by = next(p for p in block.holders if (p.pipeline, p.stage) in places)
        stage = self.graph.stage(held_by.pipeline, held_by.stage)
        device_type = self.devices[self.programs[program].devices[0]].type.name
        model = self.graph.model
        held = [b for b in block.blocks if stage.start <= b < stage.stop]
        total = 0.0
        for b in held[-1:] if block.kind == "tied" else held:
            spec = model.blocks[b]
            price = self.prices.curve(spec.kind, device_type, stage.tensor_parallel_size)[0]
            own = float(block.elements if block.kind == "tied" else model.untied_parameters(b))
            if block.kind == "expert":
                own = spec.expert_parameters / (block.shard or (0, 1))[1]
            elif block.kind == "dense" and b in stage.sharded:
                own -= spec.expert_parameters
            total += price.update_s * (own / spec.parameters if spec.parameters else 1.0)
        return total / (len(block.holders) if block.zero else 1)


def _half_s(price: BlockCost, field: str, half: int) -> float:
    """Seconds of the dense half of a block (even) or of its routed experts (odd)."""
    expert_s: float = getattr(price, f"expert_{field}")
    return expert_s if half % 2 else float(getattr(price, field)) - expert_s
