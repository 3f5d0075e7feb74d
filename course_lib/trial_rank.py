"""One rank of a trial (see trial.py): call what the notebook sent, keep what it returned, and end in time, whatever happens.

torch is imported by those who need it only: a trial of MPI alone starts in half a second.
"""

import faulthandler
import os
import pickle
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

START_UP = 60.0  # seconds until all ranks have met
MEMORY = 2  # GB more than it begins with; a loop that collects for ever must not take the whole machine's
AT_MOST = 12  # times the seconds that a call should need: on a busy machine, and if nobody asks


class Failure(NamedTuple):
    """What a rank raised, and its calls from the outermost to the innermost: (file, line, function)."""

    kind: str
    message: str
    calls: list[tuple[str, int, str]]


def be_rank(rank: int, n: int, folder: Path, seconds: float, *, join=None) -> bool:
    """Join the others, call the function with this rank, leave an outcome in the folder; whether it returned."""
    with open(folder / f"said.{rank}", "w") as said:
        os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
    faulthandler.enable(open(folder / f"death.{rank}", "w"))  # gloo aborts a process that is sent more than it expects
    stacks = open(folder / f"stacks.{rank}", "w")
    faulthandler.register(signal.SIGUSR2, file=stacks)  # it answers also when Python itself is stuck: see patience.py
    faulthandler.dump_traceback_later(START_UP, file=stacks)
    try:
        if join:
            join()
        (folder / f"joined.{rank}").write_text(str(os.getpid()))
        while len(list(folder.glob("joined.*"))) < n:  # one that returns at once must not leave while others still join
            time.sleep(0.002)
        call = pickle.loads((folder / "call").read_bytes())
        faulthandler.dump_traceback_later(AT_MOST * seconds, file=stacks)
        with _limited_memory():
            outcome = call(rank)
        pickled, returned = _pickle(outcome), True
    except BaseException as error:
        returned = False
        pickled = cloudpickle.dumps(_failure(error))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    half = folder / f"half.{rank}"
    half.write_bytes(pickled)
    half.rename(folder / f"outcome.{rank}")
    return returned


def read_outcomes(folder: Path, n: int) -> dict[int, Any]:
    """What the ranks have returned, or the Failure that they ended with; nothing of those who did not end by themselves."""
    files = {rank: folder / f"outcome.{rank}" for rank in range(n)}
    return {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Only Linux counts it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if sys.platform == "linux" and soft == resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + MEMORY * 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))  # to say what went wrong, it needs some


def _pickle(outcome) -> bytes:
    try:
        return cloudpickle.dumps(outcome)
    except Exception as error:
        kind = type(outcome).__name__
        raise TypeError(
            f"it returned a value of type {kind}, which can't be sent back to the notebook: {error}"
        ) from None


def _failure(error: BaseException) -> Failure:
    calls = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    message = re.sub(r"\[rank\d+\]:\[.+?\] ", "", str(error)).strip()  # without the time of a "Check failed" of torch's
    if isinstance(error, MemoryError):
        message = f"it asks for more than {MEMORY} GB. A loop without an end?"
    return Failure(type(error).__name__, message, calls)


def end_with(parent) -> None:
    """End when the notebook does: its end of the pipe closes then."""

    def watch() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch").start()


def unseen(function: Callable) -> Callable:
    """Hide a check's own function: what fails or hangs in it is told with the learner's line that called it."""
    function.__code__ = function.__code__.replace(co_filename=__file__)
    return function


def main() -> None:
    """One rank under mpiexec: FOLDER SECONDS. Ranks with torch are forked instead."""
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    from mpi4py import MPI

    if not be_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, folder, seconds):
        os._exit(1)  # at once: MPI_Finalize would wait for the others, who may be waiting for this rank
