"""The interpreter: runs the Program of one rank, knowing nothing of strategies.

Compute actions run in order on the calling thread. Actions of every other stream are issued in the order of their
stream, as soon as what they wait for is over, which is looked at after every compute action and, inside a backward,
whenever it has passed a block. Compute blocks only where a wait of its own next action is not over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autopiper.errors import AutoPiperError, RuntimeFault
from autopiper.plan import Action, Event, Program, Wait
from autopiper.plan.actions import COMPUTE_STREAM
from autopiper.runtime.lanes import Lanes, Pending, now_s

Handler = Callable[[Action], Pending | None]


class Interpreter:
    """Runs a Program again and again, one step at a time."""

    def __init__(self, program: Program, handlers: Mapping[str, Handler], lanes: Lanes, rank: int) -> None:
        self._handlers, self._lanes, self._rank = handlers, lanes, rank
        self._where = ", ".join(place.text for place in program.places)
        self._compute = program.streams.get(COMPUTE_STREAM, ())
        self._others = {name: actions for name, actions in program.streams.items() if name != COMPUTE_STREAM}
        self._position = {a.text: (name, i) for name, actions in self._others.items() for i, a in enumerate(actions)}
        self.watched = frozenset(w.action for a in program.actions() for w in a.waits if w.block is not None)
        """Backwards that somebody waits for block by block."""

    def run(self) -> list[Event]:
        """Run one step; return what happened when, in seconds from its start (the ends of late sends are added later).

        Raises RuntimeFault naming rank, place and action, with what was raised as its cause.
        """
        self._start = now_s()
        self._begun = self._lanes.mark()  # what is issued without a wait still needs the step's buffers to be ready
        self._events: list[Event] = []
        self._marks: dict[str, Any] = {}  # compute actions that are over
        self._passed: dict[str, dict[int, Any]] = {}  # backward in progress or over -> block passed -> mark
        self._cursor = dict.fromkeys(self._others, 0)
        self._issued: dict[str, list[tuple[Action, Pending, float]]] = {name: [] for name in self._others}
        self._finished = dict.fromkeys(self._others, 0)
        for action in self._compute:
            self._pump()
            for wait in action.waits:
                self._ensure(wait)
            start = now_s()
            self._call(action, self._handlers[action.kind], action)
            self._marks[action.text] = self._lanes.mark()
            self._note(action, start, now_s())
        for name, actions in self._others.items():
            while self._cursor[name] < len(actions):
                self._force(name)
        for name in self._others:
            self._finish(name, len(self._issued[name]))
        try:
            self._lanes.check()
        except Exception as error:
            raise RuntimeFault(f"rank {self._rank} ({self._where}), a send: {type(error).__name__}: {error}") from error
        return self._events

    def passed(self, action: str, block: int) -> None:
        """Say, from within a backward, that it has passed a block: its gradients down to there are final."""
        self._passed.setdefault(action, {})[block] = self._lanes.mark()
        self._pump()

    def sending(self, action: Action) -> Callable[[], None]:
        """Return what to call when a send that begins now is over, in this step or later."""
        events, zero, begin = self._events, self._start, now_s() - self._start

        def over() -> None:
            events.append(Event(action=action.text, stream=action.stream, start_s=begin, end_s=now_s() - zero))

        return over

    def _note(self, action: Action, start: float, end: float) -> None:
        self._events.append(
            Event(action=action.text, stream=action.stream, start_s=start - self._start, end_s=end - self._start)
        )

    def _call(self, action: Action, run: Callable[..., Any], *args: Any) -> Any:
        try:
            return run(*args)
        except Exception as error:
            if isinstance(error, RuntimeFault) and error.__cause__ is not None:
                raise  # from an action issued within this one; it says where
            text = str(error) if isinstance(error, AutoPiperError) else f"{type(error).__name__}: {error}"
            raise RuntimeFault(f"rank {self._rank} ({self._where}), action {action.text}: {text}") from error

    def _mark_of(self, wait: Wait) -> tuple[bool, Any]:
        """Return whether a compute action (or a block of it) is over, and its mark."""
        if wait.action in self._marks:
            return True, self._marks[wait.action]
        if wait.block is not None and wait.block in self._passed.get(wait.action, {}):
            return True, self._passed[wait.action][wait.block]
        return False, None

    def _met(self, wait: Wait) -> bool:
        if wait.action not in self._position:
            return self._mark_of(wait)[0]
        name, index = self._position[wait.action]
        if self._lanes.asynchronous:
            return index < len(self._issued[name])
        return index < len(self._issued[name]) and all(
            p.poll() for _, p, _ in self._issued[name][self._finished[name] : index + 1]
        )

    def _pump(self) -> None:
        """Issue every action whose turn it is and whose waits are over."""
        progress = True
        while progress:
            progress = False
            for name, actions in self._others.items():
                while self._cursor[name] < len(actions) and all(
                    self._met(w) for w in actions[self._cursor[name]].waits
                ):
                    self._issue(name)
                    progress = True

    def _force(self, name: str) -> None:
        """Issue the next action of a stream, waiting for what it waits for."""
        for wait in self._others[name][self._cursor[name]].waits:
            self._ensure(wait)
        self._issue(name)

    def _issue(self, name: str) -> None:
        action = self._others[name][self._cursor[name]]
        self._cursor[name] += 1
        marks = [self._mark_of(w)[1] for w in action.waits if w.action not in self._position]
        with self._lanes.issue(name, marks or [self._begun]):
            for wait in action.waits:
                if wait.action in self._position:
                    self._ensure(wait)
            start = now_s()
            pending = self._call(action, self._handlers[action.kind], action)
        self._issued[name].append((action, pending or Pending(), start))

    def _ensure(self, wait: Wait) -> None:
        """Wait until an action is over."""
        if wait.action not in self._position:
            over, mark = self._mark_of(wait)
            if not over:
                raise RuntimeFault(f"rank {self._rank} ({self._where}): {wait.text} is waited for before it can run")
            self._lanes.wait_for(mark)
            return
        name, index = self._position[wait.action]
        while self._cursor[name] <= index:
            self._force(name)
        self._finish(name, index + 1)

    def _finish(self, name: str, count: int) -> None:
        """Wait for the first `count` actions of a stream: a stream's order is the order of its ends, too."""
        begin = self._finished[name]
        if self._lanes.asynchronous:  # another CUDA stream may wait for what one has waited for already
            begin = min(begin, count - 1)
        for action, pending, start in self._issued[name][begin:count]:
            first = not pending.over
            self._call(action, pending.finish, self._lanes)
            if first and not action.kind.startswith("SEND"):
                self._note(action, start, now_s())
        self._finished[name] = max(self._finished[name], count)
