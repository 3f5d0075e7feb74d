"""Try a function on real ranks, with an end: whatever it does there, the notebook goes on within seconds and says why.

    on_ranks(3, lambda rank: average(gradients[rank]))     # what it returned on each rank, each a process with gloo
    on_mpi(3, lambda rank: ring(numbers[rank]))            # the same under mpiexec, with mpi4py
    alone(lambda: my_share(10, 0, 2))                      # in one process that can be stopped

The function travels by cloudpickle, so it may be defined in a cell. Ranks are forked from a process that has torch already:
a trial takes a fraction of a second. A rank that raises, dies or does not come back is named with the line where it was.
"""

import linecache
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch

from course_lib.failures import LOST, RanksError
from course_lib.launch import GUARD, ONE_THREAD
from course_lib.patience import wait
from course_lib.processes import clean_environment, kill_tree
from course_lib.trial_rank import Failure, be_rank, end_with, read_outcomes
from course_lib.world import meet_by_file, stay_on_this_machine

MISMATCH = "distributed collective mismatch"  # gloo's words; it raises them or, where nobody can catch them, aborts
TALK = re.compile(r"(recv|send|reduce|gather|scatter|barrier|broadcast|bcast|wait|all_?to_?all)\w*\(", re.IGNORECASE)
SECONDS = 5.0  # of computing, or of waiting; calls of the exercises need a few milliseconds
LINES, WIDTH = 100, 2000  # of what a rank printed: a loop without an end may have printed a million lines
LIBRARIES = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["course_lib.trial"])


def prepare(*modules: str) -> None:
    """Start the process that ranks are forked from, with torch and these modules in it, while the learner still reads.

    torch.optim imports torch._dynamo when the first optimizer is made: seconds, which each rank would spend anew.
    """
    _forks.set_forkserver_preload(["course_lib.trial", *modules])
    _start_forks()


def _start_forks() -> None:
    """Start that process if it does not run. The stop button interrupts all that a kernel has started, but not this one."""
    ours = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ours else None  # which the new process inherits
    try:
        forkserver.ensure_running()
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


class TrialError(RanksError):
    """What went wrong on which rank, and in which line."""


def alone(call: Callable[[], Any], *, seconds: float = SECONDS) -> Any:
    """What the function returns, called in a process of its own."""
    return on_ranks(1, lambda rank: call(), seconds=seconds)[0]


def on_ranks(n: int, call: Callable[[int], Any], *, seconds: float = SECONDS) -> list:
    """What call(rank) returns on each of n ranks of one process group."""
    with tempfile.TemporaryDirectory(prefix="trial-") as name:
        codes = fork_ranks(n, call, Path(name), seconds=seconds)
        return _outcomes(Path(name), codes, seconds)


def fork_ranks(n: int, call: Callable[[int], Any], folder: Path, *, seconds: float, join: bool = True) -> list:
    """Run call(rank) on n ranks, which `join` a process group first; all that they leave is in the folder. Their exit codes."""
    _send(call, folder)
    _start_forks()
    ours, theirs = _forks.Pipe()
    place = (n, theirs, folder, seconds, join)
    ranks = [_forks.Process(target=_fork, args=(rank, *place)) for rank in range(n)]
    try:
        for rank in ranks:
            rank.start()
        theirs.close()
        wait(folder, lambda: [rank.exitcode for rank in ranks], seconds)
        return [rank.exitcode for rank in ranks]
    finally:
        for end in ("kill", "join"):  # all at once: one that sees another go would take that for the trouble
            for rank in ranks:
                with suppress(ValueError, AttributeError, AssertionError):  # it was never started
                    getattr(rank, end)()
        ours.close()


def on_mpi(n: int, call: Callable[[int], Any], *, seconds: float = SECONDS) -> list:
    """What call(rank) returns on each of n ranks of an MPI world."""
    with tempfile.TemporaryDirectory(prefix="trial-") as name:
        folder = Path(name)
        _send(call, folder)
        mpiexec = [*GUARD, str(Path(sys.executable).with_name("mpiexec")), "-n", str(n)]
        code = "from course_lib.trial_rank import main; main()"  # with -m, its Failure would be another class than ours
        program = [sys.executable, "-c", code, str(folder), str(seconds)]
        with open(folder / "launcher", "w") as said:
            environment = clean_environment() | ONE_THREAD
            process = psutil.Popen([*mpiexec, *program], env=environment, stdout=said, stderr=said)
        try:
            wait(folder, lambda: [process.poll()] * n, seconds)
        finally:
            kill_tree([process])
        return _outcomes(folder, [process.poll()] * n, seconds)


def _send(call: Callable, folder: Path) -> None:
    (folder / "call").write_bytes(cloudpickle.dumps(call))


def _fork(rank: int, n: int, parent, folder: Path, seconds: float, join: bool) -> None:
    """In the new process: the variables that torchrun would set, then the call."""
    end_with(parent)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    os.environ |= dict(zip(names, map(str, (rank, rank, n, n, 1, 0)))) | ONE_THREAD | {"COURSE_PLAIN": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "trial"}
    torch.set_num_threads(1)  # the variables above come too late: torch is there already
    stay_on_this_machine()
    be_rank(rank, n, folder, seconds, join=(lambda: meet_by_file(folder / "store", rank, n)) if join else None)
    os._exit(0)  # the group needs no farewell


def _outcomes(folder: Path, codes: Sequence[int | None], seconds: float) -> list:
    """All that the ranks returned, after what they printed; or the error that explains why some did not."""
    n = len(codes)
    for rank in range(n):
        for line in _said(folder / f"said.{rank}"):
            print(f"[rank {rank}] {line}" if n > 1 else line)
    outcomes = read_outcomes(folder, n)
    failures = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, Failure)}
    stacks = {rank: stack(folder, rank) for rank in range(n) if rank not in outcomes}
    killed = [rank for rank in stacks if codes[rank] and not stacks[rank]]
    if failures and not (killed and all(LOST.search(failure.message) for failure in failures.values())):
        raise _explain_failure(failures, n)
    if any(stacks.values()):
        raise _explain_hang(outcomes, stacks, seconds)
    if stacks:
        rank = min(killed or stacks)
        said = Path(folder, "launcher").read_text() if Path(folder, "launcher").exists() else ""
        raise _explain_death(folder, rank, codes[rank], n, said)
    return [outcomes[rank] for rank in range(n)]


def _said(path: Path) -> list[str]:
    """The lines that a rank printed; of very many the first and the last."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    if len(lines) > LINES:
        lines[LINES // 2 : -LINES // 2] = [f"… ({len(lines) - LINES:,} lines are left out here)"]
    return [line if len(line) <= WIDTH else f"{line[:WIDTH]}… ({len(line):,} characters)" for line in lines]


# ---- why -------------------------------------------------------------------------------------------------------------------


def _who(rank: int, n: int) -> str:
    return f"rank {rank}" if n > 1 else "your code"


def _explain_failure(failures: dict[int, Failure], n: int) -> TrialError:
    """The first rank that failed by itself; those who only lost it come last."""
    rank = min(failures, key=lambda rank: (bool(LOST.search(failures[rank].message)), rank))
    failure = failures[rank]
    place = _place(failure.calls)
    if failure.kind == "NotImplementedError" and not failure.message:  # a stub's; torch's own say what they lack
        return TrialError(f"{_function(failure.calls)} is still to be written")
    if MISMATCH in failure.message:
        return _explain_mismatch(rank, place)
    if LOST.search(failure.message):
        return TrialError(
            f"rank {rank} was left alone{place}: the rank that it waits for had returned already. All ranks must make the "
            "same calls in the same order"
        )
    return TrialError(f"{_who(rank, n)} failed{place}: {failure.kind}: {failure.message}")


def _explain_mismatch(rank: int, place: str) -> TrialError:
    return TrialError(
        f"rank {rank}{place} was sent another number of bytes than it waits for: the ranks are in different calls, or their "
        "tensors differ in size. All ranks must make the same calls in the same order"
    )


def _explain_hang(outcomes: dict, stacks: dict[int, list], seconds: float) -> TrialError:
    n = len(outcomes) + len(stacks)
    lines = [f"{_who(rank, n)} is{_place(calls) or ' not in your code'}" for rank, calls in stacks.items() if calls]
    if n == 1:
        return TrialError(f"stopped after {seconds:g} s: {lines[0]}. A loop without an end, or a wait for nobody?")
    lines += [f"rank {rank} has returned" for rank in outcomes]
    waiting = not outcomes and all(_communicates(calls) for calls in stacks.values() if calls)
    reason = "they wait for each other: a deadlock" if waiting else "somebody waits, or loops, for ever"
    return TrialError(f"stopped after {seconds:g} s, {reason}: {'; '.join(lines)}")


def _communicates(calls: list) -> bool:
    """Whether a rank is in a call to others: its line says so, or where that leads; a function's name does not."""
    call = _yours(calls)
    code = linecache.getline(*call[:2]) if call else ""
    deeper = calls[calls.index(call) + 1 :] if call else calls
    return bool(TALK.search(code)) or any("/torch/distributed/" in file for file, _, _ in deeper)


def _explain_death(folder: Path, rank: int, code: int | None, n: int, launcher: str) -> TrialError:
    """Of a rank that ended without a word of Python's: where it was, if that could still be written down."""
    how = f"was killed by signal {-code}" if code and code < 0 else f"ended with exit code {code}"
    place = _place(stack(folder, rank, when="death"))
    said = folder / f"said.{rank}"
    if said.exists() and MISMATCH in said.read_text(errors="replace"):
        return _explain_mismatch(rank, place)
    return TrialError(f"{_who(rank, n)} {how}{place} before it returned anything", launcher)


def stack(folder: Path, rank: int, *, when: str = "stacks") -> list[tuple[str, int, str]]:
    """The calls of a rank that was stopped, the outermost first, from what faulthandler wrote of its main thread."""
    path = folder / f"{when}.{rank}"
    text = path.read_text(errors="replace") if path.exists() else ""
    threads = [re.findall(r'File "(.+)", line (\d+) in (\S+)', part) for part in text.split("most recent call first")]
    threads = [[(file, int(line), name) for file, line, name in reversed(calls)] for calls in threads if calls]
    ours = [calls for calls in threads if any(_is_yours(call) for call in calls)]
    return (ours or threads or [[]])[-1]


def _is_yours(call: tuple[str, int, str]) -> bool:
    return not call[0].startswith(LIBRARIES) and not call[0].endswith(".pyx")  # mpi4py's own


def _yours(calls: list) -> tuple[str, int, str] | None:
    return next((call for call in reversed(calls) if _is_yours(call)), None)


def _function(calls: list) -> str:
    call = _yours(calls)
    return call[2] if call else "this"


def _place(calls: list) -> str:
    """In which line of which function of the learner's."""
    call = _yours(calls)
    if not call:
        return ""
    file, line, name = call
    code = linecache.getline(file, line).strip()
    return f" in `{name}`, line {line} of its cell" + (f" (`{code}`)" if code else "")
