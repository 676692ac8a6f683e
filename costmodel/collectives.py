"""Seconds that bytes take between devices: latency + bytes / bandwidth, and rings of that.

A measured `LinkCost` of a tier wins over the figures of the cluster. Bytes are those of the whole message.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from autopiper._data import data
from autopiper.cluster.spec import Cluster, Link
from autopiper.errors import CostError
from autopiper.plan.costs import CostTable, LinkCost


def _measured(costs: CostTable, tier: str) -> LinkCost | None:
    return next((link for link in costs.links if link.tier == tier), None)


def _check(num_bytes: float) -> None:
    if not (num_bytes >= 0 and math.isfinite(num_bytes)):
        raise CostError(f"num_bytes is {num_bytes}; a message has zero or more bytes, and finitely many")


def path(costs: CostTable, cluster: Cluster, a: int, b: int) -> Link:
    """Return what one message between two devices gets.

    Inside a node the devices' own link; between nodes one network interface of each (a message does not use several),
    and no more than the tier between them. A measured price of the tier replaces all of this.
    """
    measured = _measured(costs, cluster.tier(a, b))
    if measured is not None:
        return Link(bytes_per_s=measured.bytes_per_s, latency_s=measured.latency_s)
    link = cluster.link(a, b)
    ends = (cluster.nodes[cluster.device(a).node], cluster.nodes[cluster.device(b).node])
    if ends[0] is ends[1]:
        return link
    return Link(bytes_per_s=min(link.bytes_per_s, *(n.nic.bytes_per_s for n in ends)), latency_s=link.latency_s)


def transfer_s(costs: CostTable, cluster: Cluster, a: int, b: int, num_bytes: float) -> float:
    """Return the seconds of one message of `num_bytes` from device a to device b; 0 on one device or for no bytes."""
    _check(num_bytes)
    if a == b or num_bytes == 0:
        return 0.0
    link = path(costs, cluster, a, b)
    return link.latency_s + num_bytes / link.bytes_per_s


def ring_all_reduce_s(link: Link, size: int, num_bytes: float) -> float:
    """Return the seconds of a ring all-reduce of `num_bytes` on each of `size` devices over equal links.

    2(n-1) steps of one n-th of the bytes each (Thakur, Rabenseifner, Gropp 2005, section 4.4.3, reduce-scatter and
    all-gather by rings).
    """
    if size <= 1 or num_bytes == 0:
        return 0.0
    return 2 * (size - 1) * (link.latency_s + num_bytes / size / link.bytes_per_s)


def all_reduce_s(
    costs: CostTable, cluster: Cluster, devices: Sequence[int], num_bytes: float, *, sharing: int = 1
) -> float:
    """Return the seconds that summing `num_bytes` over `devices` takes, the sum being left on each of them.

    A ring through all n devices, node after node, so that it enters and leaves each of the N nodes once:

        2(n-N)·latency inside + 2(N-1)·latency between + 2(n-1)/n · bytes / slowest link

    Of a node's interfaces the ring uses as many as it has devices there (one ring per interface), and `sharing` is the
    number of such groups that use the interfaces of a node at the same time. Devices may be unlike. 0 for one device
    or no bytes. Raises CostError for no device, a device named twice, or `sharing` below 1.
    """
    _check(num_bytes)
    return 2 * ring(costs, cluster, devices, sharing=sharing, what="all-reduce").seconds(num_bytes)


@data
class Ring:
    """A ring through devices, node after node: what one round of it takes beside its bytes, and what it carries."""

    size: int
    latency_s: float
    """Of the size - 1 steps of a reduce-scatter or all-gather, all together."""
    bytes_per_s: float
    """On its slowest link."""

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of a reduce-scatter or all-gather of `num_bytes`; an all-reduce is one of each."""
        if self.size == 1 or num_bytes == 0:
            return 0.0
        return self.latency_s + (self.size - 1) / self.size * num_bytes / self.bytes_per_s


def ring(costs: CostTable, cluster: Cluster, devices: Sequence[int], *, sharing: int = 1, what: str = "a ring") -> Ring:
    """Lay a ring through devices; raises CostError as `all_reduce_s` does."""
    if sharing < 1:
        raise CostError(f"sharing is {sharing}; at least one group uses the network, so it must be 1 or more")
    _check_group(devices, what)
    held = Counter(cluster.device(d).node for d in sorted(devices))
    inside = [_inside(costs, cluster, node) for node, count in held.items() if count > 1]
    between = list(_between(costs, cluster, held, sharing))
    return Ring(
        size=len(devices),
        latency_s=(len(devices) - len(held)) * max((link.latency_s for link in inside), default=0.0)
        + (len(held) - 1) * max((link.latency_s for link in between), default=0.0),
        bytes_per_s=min((link.bytes_per_s for link in (*inside, *between)), default=math.inf),
    )


def _check_group(devices: Sequence[int], what: str) -> None:
    if not devices or len(set(devices)) != len(devices):
        raise CostError(f"{what} over devices {list(devices)}: give at least one, each once")


def all_to_all_s(
    costs: CostTable, cluster: Cluster, devices: Sequence[int], num_bytes: float
) -> tuple[float, float, float]:
    """Return (seconds, inside nodes, between nodes) of an all-to-all: each device gives away `num_bytes`, evenly.

    Pairwise exchange (Thakur, Rabenseifner, Gropp 2005, section 4.2): each of the n devices sends bytes/n to each
    other, one latency a message; those for its own node over its own link, those for other nodes over the interfaces,
    which the devices of a node share. Both go on at once, so the longer one counts, for the worst node.
    """
    _check(num_bytes)
    _check_group(devices, "all-to-all")
    n = len(devices)
    if n == 1 or num_bytes == 0:
        return 0.0, 0.0, 0.0
    held = Counter(cluster.device(d).node for d in sorted(devices))
    inside_s = between_s = 0.0
    links = dict(zip(held, _between(costs, cluster, held, 1), strict=False))
    for node, own in held.items():
        if own > 1:
            link = _inside(costs, cluster, node)
            inside_s = max(inside_s, (own - 1) * (link.latency_s + num_bytes / n / link.bytes_per_s))
        if own < n:
            link = links[node]
            between_s = max(between_s, (n - own) * (link.latency_s + own * num_bytes / n / link.bytes_per_s))
    return max(inside_s, between_s), inside_s, between_s


def _inside(costs: CostTable, cluster: Cluster, node: int) -> Link:
    measured = _measured(costs, "node")
    if measured is not None:
        return Link(bytes_per_s=measured.bytes_per_s, latency_s=measured.latency_s)
    return cluster.nodes[node].intra


def _between(costs: CostTable, cluster: Cluster, held: Counter[int], sharing: int) -> Iterable[Link]:
    """Yield the links of the ring between neighbouring nodes, each as wide as this ring may use it."""
    nodes = list(held)
    if len(nodes) == 1:
        return
    for here, there in zip(nodes, (*nodes[1:], nodes[0]), strict=True):
        a, b = cluster.first_device(here), cluster.first_device(there)
        measured = _measured(costs, cluster.tier(a, b))
        if measured is not None:
            yield Link(bytes_per_s=measured.bytes_per_s / sharing, latency_s=measured.latency_s)
            continue
        link = cluster.link(a, b)
        own = min(cluster.nodes[n].nic.bytes_per_s * min(held[n], cluster.nodes[n].nics) for n in (here, there))
        yield Link(bytes_per_s=min(link.bytes_per_s / sharing, own), latency_s=link.latency_s)
