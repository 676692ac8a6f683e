"""Start the ranks of a plan on this machine, and end all of them when one fails.

The ranks see the environment that torchrun gives (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …), so the same training
function or script runs under torchrun on many machines.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing as mp
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from autopiper import errors
from autopiper._data import data
from autopiper.errors import AutoPiperError, PlanError, RuntimeFault
from autopiper.plan import Plan, load_plan

GRACE_S = 0.5
"""After the first fault: how long others may report one that happened earlier."""
END_S = 3.0
"""How long a rank has to end when told to, before it is killed."""
DONE_S = 90.0
"""How long a rank has to leave after its training function returned."""
PLAN_VARIABLE = "AUTOPIPER_PLAN"
"""Names the plan's file to a script that `launch` runs."""


@data
class Fault:
    """What a rank reports when it fails."""

    rank: int
    at_s: float
    kind: str
    """Class of what was raised."""
    text: str
    trace: str


def run_local(
    plan: Plan,
    train_fn: Callable[..., Any],
    *args: Any,
    setup: Callable[[int], None] | None = None,
    timeout: float | None = None,
    num_threads: int = 1,
) -> list[Any]:
    """Run `train_fn(plan, *args)` on every rank of the plan, each a process of its own; return their results by rank.

    `train_fn`, its arguments and results must be picklable. `setup(rank)` is called first in each process (to bind it
    to a core, say); each computes with `num_threads` threads. Raises what a rank raised first: PlanError and its like
    as they are, anything else as RuntimeFault with the traceback of that rank; after `timeout` seconds, RuntimeFault.
    In every case, Ctrl-C included, no rank is left running.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    world_size = len(plan.devices)
    # The store lives here, so that no port has to be guessed, and a failing rank 0 does not take it away.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    processes: list[SpawnProcess] = []
    readers: dict[Connection, int] = {}
    try:
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(rank, world_size, store.port, writer, setup, num_threads, train_fn, (plan, *args)),
                name=f"rank{rank}",
                daemon=False,  # daemons may have no children, such as the workers of a DataLoader
            )
            try:
                process.start()
            except (AttributeError, TypeError, pickle.PicklingError) as error:  # local functions, live objects
                raise PlanError(f"run_local cannot hand its arguments to other processes: {error}") from None
            writer.close()
            processes.append(process)
            readers[reader] = rank
        results = _collect(readers, processes, timeout)
        for process in processes:
            process.join(DONE_S)
        return results
    finally:
        _end(processes)
        for reader in readers:
            reader.close()


def launch(plan_path: str | Path, script: str | Path, script_args: Sequence[str] = (), *, num_threads: int = 1) -> int:
    """Run a training script on every rank of a plan on this machine; return 0. Errors and ends as `run_local`.

    The script finds the plan's path in the environment variable AUTOPIPER_PLAN, and its arguments in sys.argv.
    """
    if not Path(script).is_file():
        raise PlanError(f"there is no script '{script}'")
    plan = load_plan(plan_path)
    run_local(plan, _script, str(Path(plan_path).resolve()), str(script), tuple(script_args), num_threads=num_threads)
    return 0


def _script(_: Plan, plan_path: str, script: str, arguments: tuple[str, ...]) -> None:
    os.environ[PLAN_VARIABLE] = plan_path
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def _child(
    rank: int,
    world_size: int,
    port: int,
    writer: Connection,
    setup: Callable[[int], None] | None,
    num_threads: int,
    train_fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Be one rank: report the result or the first fault, and leave."""
    mp.set_start_method(None, force=True)  # spawned itself, but what it starts is started as under torchrun
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends everybody
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        if setup is not None:
            setup(rank)
        import torch

        torch.set_num_threads(num_threads)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # a rank that is ended keeps no lines back
        writer.send_bytes(pickle.dumps(train_fn(*args)))  # by value: torch's own pickler would share memory
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too: nobody may leave without a word
        cause = error.__cause__ if isinstance(error, RuntimeFault) and error.__cause__ else error
        known = isinstance(error, AutoPiperError)
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            said = f"the script ended with exit code {error.code}"
        text = str(error) if known else f"rank {rank}: {said}"
        kind = type(error).__name__ if known else "RuntimeFault"
        trace = "".join(traceback.format_exception(cause))
        fault = Fault(rank=rank, at_s=time.monotonic(), kind=kind, text=text, trace=trace)
        writer.send_bytes(pickle.dumps(fault))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # communicators would wait at exit for ranks that wait for this one


def _collect(readers: dict[Connection, int], processes: Sequence[BaseProcess], timeout: float | None) -> list[Any]:
    """Wait for all results. Raises the earliest fault, once those who failed earlier had time to say so."""
    results: list[Any] = [None] * len(processes)
    left = dict(readers)
    faults: list[Fault] = []
    done: list[int] = []
    deadline = None if timeout is None else time.monotonic() + timeout
    while left:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait(list(left), remaining)
        if not ready:
            break
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = left.pop(reader)
            message = _receive(reader, rank, processes[rank])
            if isinstance(message, Fault):
                faults.append(message)
                deadline = min(deadline or float("inf"), time.monotonic() + GRACE_S)
            else:
                results[rank] = message
                done.append(rank)
    if faults:
        _raise(min(faults, key=lambda f: f.at_s), done)
    if left:
        slow = ", ".join(str(rank) for rank in sorted(left.values()))
        raise RuntimeFault(f"rank {slow} did not end within the timeout of {timeout} s")
    return results


def _receive(reader: Connection, rank: int, process: BaseProcess) -> Any:
    try:
        return pickle.loads(reader.recv_bytes())
    except EOFError:
        process.join(END_S)
        code = process.exitcode
    how = (
        f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"left with exit code {code}"
    )
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    # Whoever dies without a word made the others fail, however early they said so.
    return Fault(
        rank=rank, at_s=float("-inf"), kind="RuntimeFault", trace="",
        text=f"rank {rank} {how}{hint} without a traceback; its own output says more, if anything does",
    )  # fmt: skip


def _raise(fault: Fault, done: Sequence[int]) -> None:
    """Raise a fault; `done`: ranks that had ended well, maybe while others still waited for them."""
    if fault.kind != "RuntimeFault" and isinstance(getattr(errors, fault.kind, None), type):
        raise getattr(errors, fault.kind)(fault.text)
    early = f" (rank {', '.join(map(str, sorted(done)))} had ended before, without a fault)" if done else ""
    raise RuntimeFault(f"{fault.text}{early}\n\n{fault.trace}" if fault.trace else fault.text + early)


def _end(processes: Sequence[BaseProcess]) -> None:
    """Leave no rank running."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    limit = time.monotonic() + END_S
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
