"""A place come to life: the stage that a rank runs there, and what its messages consist of.

A rank holds one place, or several: virtual stages of one pipeline, stages of opposite pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopiper.ir import TrainingGraph
from autopiper.plan import Place, Program
from autopiper.runtime.channels import Channel, Form
from autopiper.runtime.gradients import BackwardWatch
from autopiper.runtime.stages import LiveStage


class LivePlace:
    """One place of a rank."""

    def __init__(
        self, graph: TrainingGraph, program: Program, place: Place, stage: LiveStage, channels: Mapping[str, Channel]
    ) -> None:
        self.place, self.stage = place, stage
        self.key = (place.pipeline, place.stage)
        self._part = graph.stage(place.pipeline, place.stage)
        self.parameters = tuple(stage.held.values())
        self.watch = BackwardWatch(stage)
        self.received: Form | None = None
        """What the stage before hands over."""
        self.put_out: Form | None = None
        self._back = [
            channels[name]
            for name, actions in program.streams.items()
            if name in channels and actions[0].kind == "RECV_B" and (actions[0].pipeline, actions[0].stage) == self.key
        ]

    def range(self, micro_batch: int) -> tuple[int, int]:
        """Return the samples [start, stop) of a micro-batch that are this place's."""
        return self._part.ranges(micro_batch)[self.place.member]

    def learn(self, form: Form) -> None:
        """Hear what the stage puts out: what comes back has the form of what went out."""
        self.put_out = form
        for channel in self._back:
            channel.learn(form.gradients())
