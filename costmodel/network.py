"""What messages and collectives take when alone, and what they ask of the links and interfaces that they share.

Pools that running transfers share, each per direction: the port of a device inside its node; all interfaces of a node
together; and a node's link into a tier of the network. A transfer asks of each pool for what it carries per second when
alone; where that is more than there is, the simulator's kernel slows all of them down in proportion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from autopiper.cluster.spec import Cluster, Link
from autopiper.costmodel.collectives import Ring, all_to_all_s, path, ring, transfer_s
from autopiper.plan.costs import CostTable

Use = tuple[tuple[object, ...], float, float]
"""(pool, bytes/s asked of it when alone, bytes/s that it has)."""
Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Network:
    """The links of one cluster under one cost table."""

    def __init__(self, costs: CostTable, cluster: Cluster, stands_for: Mapping[int, int] | None = None) -> None:
        """`stands_for`: node -> the node whose pools count for both, where equal replicas load them equally."""
        self.costs, self.cluster = costs, cluster
        self.stands_for = stands_for or {}
        self.devices = cluster.devices()
        self.measured = {link.tier: link.bytes_per_s for link in costs.links}
        self.tiers = {tier.name: tier.link.bytes_per_s for tier in cluster.tiers}
        self._rings: dict[tuple[int, ...], Ring] = {}

    def message(
        self, a: int, b: int, num_bytes: float, *, width: int = 1, leaving: int = 1, arriving: int = 1
    ) -> tuple[float, list[Use]]:
        """Return (seconds when alone, uses) of a message of `num_bytes` on each of `width` parallel ranks.

        `leaving`, `arriving`: how many equal ones leave the node of a, and arrive at that of b, at the same time.
        """
        seconds = transfer_s(self.costs, self.cluster, a, b, num_bytes)
        if a == b or num_bytes == 0:
            return seconds, []
        bytes_per_s = path(self.costs, self.cluster, a, b).bytes_per_s
        if self.devices[a].node == self.devices[b].node:
            return seconds, [self._port(a, "out", bytes_per_s), self._port(b, "in", bytes_per_s)]
        return seconds, [
            *self._interfaces(a, b, "out", width * leaving * bytes_per_s),
            *self._interfaces(b, a, "in", width * arriving * bytes_per_s),
        ]

    def collective(
        self, kind: Collective, devices: Sequence[int], present: Iterable[int], num_bytes: float, *, width: int = 1,
        rings: Mapping[int, int] | None = None,
    ) -> tuple[float, list[Use]]:  # fmt: skip
        """Return (seconds when alone, uses) of a ring over `devices`, one for each of `width` parallel ranks.

        `present`: the devices whose pools are to be counted (of equal replicas only the first is simulated). `rings`: node ->
        how many rings equal to this one run through it at the same time, this one included (1 where it says nothing).
        """
        key = tuple(devices)
        if key not in self._rings:
            self._rings[key] = ring(self.costs, self.cluster, devices)
        seconds = self._rings[key].seconds(num_bytes) * (2 if kind == "all_reduce" else 1)
        if seconds == 0:
            return 0.0, []
        return seconds, self._ring(devices, present, self._rings[key].bytes_per_s, width, rings or {})

    def exchange(
        self, devices: Sequence[int], present: Iterable[int], num_bytes: float, *, width: int = 1,
        others: Sequence[Sequence[int]] = (),
    ) -> tuple[float, list[Use]]:  # fmt: skip
        """Return (seconds when alone, uses) of an all-to-all in which each device gives away `num_bytes`, evenly.

        `others`: the devices of each equal one that goes on at the same time and is not simulated itself.
        """
        seconds, inside_s, between_s = all_to_all_s(self.costs, self.cluster, devices, num_bytes)
        if seconds == 0:
            return 0.0, []
        groups = [Counter(self.devices[d].node for d in group) for group in (devices, *others)]
        held = groups[0]
        uses: list[Use] = []
        for d in present:
            own = held[self.devices[d].node]
            if own > 1 and inside_s:
                rate = num_bytes * (own - 1) / len(devices) / seconds
                uses += [self._port(d, "out", rate), self._port(d, "in", rate)]
        if between_s:
            for d in self._one_per_node(present):
                pairs = sum(
                    group[self.devices[d].node] * (len(devices) - group[self.devices[d].node]) for group in groups
                )
                rate = width * pairs * num_bytes / len(devices) / seconds
                far = next(e for e in devices if self.devices[e].node != self.devices[d].node)
                uses += [*self._interfaces(d, far, "out", rate), *self._interfaces(d, far, "in", rate)]
        return seconds, uses

    def _ring(
        self, devices: Sequence[int], present: Iterable[int], rate: float, width: int, rings: Mapping[int, int]
    ) -> list[Use]:
        held = Counter(self.devices[d].node for d in devices)
        present = list(present)
        uses: list[Use] = []
        for d in present:
            if held[self.devices[d].node] > 1:
                uses += [self._port(d, "out", rate), self._port(d, "in", rate)]
        if len(held) > 1:
            for d in self._one_per_node(present):
                far = next(e for e in devices if self.devices[e].node != self.devices[d].node)
                asked = rings.get(self.devices[d].node, 1) * width * rate
                uses += [*self._interfaces(d, far, "out", asked), *self._interfaces(d, far, "in", asked)]
        return uses

    def _one_per_node(self, devices: Iterable[int]) -> list[int]:
        return list({self.devices[d].node: d for d in devices}.values())

    def _port(self, device: int, way: str, rate: float) -> Use:
        intra: Link = self.cluster.nodes[self.devices[device].node].intra
        return ("port", device, way), rate, max(intra.bytes_per_s, self.measured.get("node", 0.0))

    def _interfaces(self, device: int, far: int, way: str, rate: float) -> list[Use]:
        """Return what is asked of a node's interfaces and of its link into the tier towards a far device."""
        node = self.devices[device].node
        tier, own = self.cluster.tier(device, far), self.cluster.nodes[node].network.bytes_per_s
        least, pool = self.measured.get(tier, 0.0), self.stands_for.get(node, node)
        # A pool is the node's and holds whoever is at the other end, so that end's interfaces do not count here.
        return [
            (("interfaces", pool, way), rate, max(own, least)),
            ((tier, pool, way), rate, max(min(own, self.tiers.get(tier, own)), least)),
        ]
