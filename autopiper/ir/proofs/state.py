"""Parameters, gradients, loss, norm and updates: gathered before use, reduced once when final, updated once and last."""

from __future__ import annotations

from collections.abc import Iterator

from autopiper.ir.graph import Bucket, GradientBlock
from autopiper.ir.proofs.view import FINAL, View, touched
from autopiper.plan.actions import COMPUTE_KINDS, GATHER_KINDS, RELEASE_KINDS


class State:
    """Actions of a Program that keep parameters and gradients, by gradient block and bucket."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.reduces: dict[tuple[int, int], list[int]] = {}
        self.gathers: dict[tuple[int, int], list[int]] = {}
        self.releases: dict[tuple[int, int], list[int]] = {}
        self.regathers: dict[tuple[int, int], list[int]] = {}
        self.updates: dict[int, int] = {}
        for number, action in enumerate(view.actions):
            kind = action.kind
            key = (action.gradient_block or 0, action.bucket or 0)
            if kind == "UPDATE":
                self.updates.setdefault(key[0], number)
            elif kind == "REDUCE_GRAD":
                self.reduces.setdefault(key, []).append(number)
            elif kind == "UNSHARD":
                self.regathers.setdefault(key, []).append(number)
            elif kind in GATHER_KINDS:
                self.gathers.setdefault(key, []).append(number)
            elif kind in RELEASE_KINDS:
                self.releases.setdefault(key, []).append(number)
        self.backward = view.computing(FINAL)
        self.computes = view.computing(COMPUTE_KINDS)

    def faults(self) -> list[str]:
        """Every fault of this Program's parameters and gradients."""
        view = self.view
        found = list(self._step())
        for block in view.graph.gradient_blocks:
            if not view.holds(block):
                for which in (self.reduces, self.gathers, self.releases, self.regathers):
                    for (index, _), numbers in which.items():
                        found += [self._alien(n) for n in numbers if index == block.index]
                found += [self._alien(n) for index, n in self.updates.items() if index == block.index]
                continue
            found += self._update(block)
            mine = self._within(block, self.backward), self._within(block, self.computes)
            for number, bucket in enumerate(block.buckets):
                key = (block.index, number)
                found += self._reductions(block, number, bucket, mine[0])
                found += self._gathers(block, bucket, key, mine[1])
                found += self._regathers(block, key)
        return found

    def _alien(self, number: int) -> str:
        return f"{self.view.name}: {self.view.actions[number].text} is not its business"

    def _within(
        self, block: GradientBlock, actions: list[tuple[int, tuple[int, int]]]
    ) -> list[tuple[int, tuple[int, int]]]:
        low, high = 2 * min(block.blocks), 2 * max(block.blocks) + 1
        return [(n, halves) for n, halves in actions if halves[0] <= high and halves[1] > low]

    def _reductions(
        self, block: GradientBlock, number: int, bucket: Bucket, backward: list[tuple[int, tuple[int, int]]]
    ) -> Iterator[str]:
        """Each bucket: when its gradients are final, once a step; or so that each backward is in exactly one reduction."""
        view = self.view
        found = self.reduces.get((block.index, number), [])
        name = f"g{block.index}.{number}REDUCE_GRAD"
        if len(block.holders) == 1:
            yield from map(self._alien, found)
            return
        finals = [(n, at) for n, halves in backward if (at := touched(block, bucket, halves))]
        if block.zero < 2:
            each = [n for n in found if view.actions[n].micro_batch is None]
            yield from (self._alien(n) for n in found if n not in each)
            if not each:
                yield f"{view.name}: {name} is missing"
            elif finals:
                yield from self._after(each[0], *finals[-1])
            return
        home = next(s for s in view.stages if s.start <= block.blocks[0] < s.stop)
        slot = self._row(home.pipeline, home.index)
        ends = sorted((slot.get(view.actions[n].micro_batch, -1), n) for n in found)
        for place, n in ends:
            if place < 0 or view.actions[n].micro_batch is None:
                yield self._alien(n)
        covered: dict[int, tuple[int, list[int]]] = {}
        for n, at in finals:
            mb = view.actions[n].micro_batch
            cover = next((r for place, r in ends if place >= slot[mb]), None) if mb in slot else None
            if cover is None:
                yield f"{view.name}: gradients of {view.actions[n].text} are in no {name}"
            else:
                covered[cover] = (n, at)
        for cover, (n, at) in covered.items():
            yield from self._after(cover, n, at)

    def _row(self, pipeline: int, stage: int) -> dict[int | None, int]:
        """Micro-batch -> place of its last backward in the row of the device group, empty slices included."""
        return {
            it.micro_batch: place for place, it in enumerate(self.view.row.passes())
            if it.kind in FINAL and (it.pipeline, it.stage) == (pipeline, stage)
        }  # fmt: skip

    def _after(self, reduce: int, backward: int, blocks: list[int]) -> Iterator[str]:
        view = self.view
        if not view.passed(backward, min(blocks), reduce):
            yield (
                f"{view.name}: {view.actions[reduce].text} may start before {view.actions[backward].text} has passed "
                f"block {min(blocks)}"
            )

    def _gathers(
        self, block: GradientBlock, bucket: Bucket, key: tuple[int, int], computes: list[tuple[int, tuple[int, int]]]
    ) -> Iterator[str]:
        """ZeRO 3: the n-th release lets go what the n-th gather brought; each pass has the next release's gather before it."""
        view = self.view
        gathers, releases = self.gathers.get(key, []), self.releases.get(key, [])
        if block.zero != 3:
            yield from map(self._alien, (*gathers, *releases))
            return
        name = f"g{key[0]}.{key[1]}"
        if len(gathers) != len(releases) or len({view.stream[n] for n in gathers}) > 1:
            yield f"{view.name}: {name} has {len(gathers)} UNSHARD and {len(releases)} RESHARD, which are no pairs on one stream"
            return
        for gather, release in zip(gathers, releases, strict=True):
            if not view.over(gather, release):
                yield f"{view.name}: {view.actions[release].text} does not wait for {view.actions[gather].text}"
        turn = 0
        for n, halves in computes:
            if not touched(block, bucket, halves):
                continue
            while turn < len(releases) and view.position[releases[turn]] < view.position[n]:
                turn += 1
            if turn == len(releases) or not view.over(gathers[turn], n):
                yield f"{view.name}: {view.actions[n].text} may start without the parameters of {name}"

    def _regathers(self, block: GradientBlock, key: tuple[int, int]) -> Iterator[str]:
        """ZeRO 1 and 2: what was updated in parts is gathered once, after the update."""
        view = self.view
        found = self.regathers.get(key, [])
        if block.zero not in (1, 2):
            yield from map(self._alien, found)
        elif not found:
            yield f"{view.name}: g{key[0]}.{key[1]}UNSHARD is missing"
        elif key[0] in self.updates and not view.over(self.updates[key[0]], found[0]):
            yield f"{view.name}: {view.actions[found[0]].text} does not wait for g{key[0]}UPDATE"

    def _update(self, block: GradientBlock) -> Iterator[str]:
        """Once, after everything that makes or uses what it changes."""
        view = self.view
        if block.index not in self.updates:
            yield f"{view.name}: g{block.index}UPDATE is missing"
            return
        update = self.updates[block.index]
        needed = [view.at[text] for text in self._ends() if text in view.at]
        for number in range(len(block.buckets)):
            key = (block.index, number)
            needed += [*self.reduces.get(key, ()), *self.gathers.get(key, ())]
        uses = [
            n
            for n, halves in self._within(block, self.computes)
            if any(touched(block, b, halves) for b in block.buckets)
        ]
        for n in (*needed, *uses[-1:]):
            if not view.over(n, update):
                yield f"{view.name}: {view.actions[update].text} does not wait for {view.actions[n].text}"

    def _ends(self) -> tuple[str, ...]:
        return ("LOSS", "NORM") if self.view.graph.training.needs_norm else ("LOSS",)

    def _step(self) -> Iterator[str]:
        """LOSS after the forwards of last stages; NORM after all gradients, and only where it is asked for."""
        view = self.view
        for text in self._ends():
            if text not in view.at:
                yield f"{view.name}: {text} is missing"
        if "NORM" in view.at and not view.graph.training.needs_norm:
            yield self._alien(view.at["NORM"])
        for text, needed in (("LOSS", self._last_forwards()), ("NORM", self._gradients())):
            if text in view.at:
                for n in needed:
                    if not view.over(n, view.at[text]):
                        what = f"the last forward, {view.actions[n].text}" if text == "LOSS" else view.actions[n].text
                        yield f"{view.name}: {text} does not wait for {what}"

    def _last_forwards(self) -> list[int]:
        view = self.view
        found = [
            n for n, _ in view.computing(("F",))
            if (a := view.actions[n]).stage == len(view.graph.pipelines[a.pipeline].stages) - 1
            and a.segment == view.graph.stage(a.pipeline, a.stage).num_segments - 1
        ]  # fmt: skip
        return found[-1:]

    def _gradients(self) -> list[int]:
        return [n for numbers in self.reduces.values() for n in numbers] + [n for n, _ in self.backward[-1:]]
