"""A whole training run on several ranks, as a subprocess of the notebook: ranks.torchrun(2, Config(strategy="ddp"))."""

import os
import re
import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

import psutil

from course_lib.config import Config
from course_lib.processes import clean_environment, kill_tree

GUARD = [sys.executable, "-m", "course_lib.guard", str(os.getpid())]  # what follows ends with this process
LOST = re.compile(
    r"(?i)gloo|nccl|pair closure|connection|timed out|timeout"
)  # said by those whom another rank has left
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # one a rank, and none that spins


class RanksError(RuntimeError):
    """What went wrong on the ranks: the rank that failed first, in its own words."""

    def __init__(self, summary: str, details: str = ""):
        super().__init__(summary)
        self.details = details

    def _render_traceback_(self) -> list[str]:
        """IPython shows this: the rank's own traceback, not the way that it took to the notebook."""
        return [*self.details.splitlines(), f"{type(self).__name__}: {self}"]


def torchrun(
    n: int, program: Config | list, *, max_restarts: int = 0, quiet: bool = False, environment: dict | None = None
) -> Path | None:
    """Train on n ranks of this machine by torchrun, or run a script: [path, argument, …].

    Lines are tagged by rank as they come; the first rank that fails is raised. Returns the run's folder.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", "--tee=3"]
    is_training = isinstance(program, Config)
    words = ["-m", "course_lib.train", *program.arguments()] if is_training else [str(word) for word in program]
    command = [*GUARD, *launcher, f"--max-restarts={max_restarts}", *words]
    variables = {
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] ",
        "COURSE_PLAIN": "1",
        "PYTHONUNBUFFERED": "1",
    }
    environment = clean_environment() | ONE_THREAD | variables | (environment or {})
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = psutil.Popen(command, env=environment, text=True, errors="replace", **pipes)
    lines = deque(maxlen=2000)
    try:
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("[rank ") and not quiet:
                print(line, end="", flush=True)
        code = process.wait()
    finally:
        kill_tree([process])
    if code:
        raise first_failure(list(lines), code)
    return program.run if is_training else None


def find_ranks(word: str) -> dict[int, psutil.Process]:
    """The ranks that run below this process with this word in their command line."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "RANK" in process.environ() and any(word in part for part in process.cmdline()):
                found[int(process.environ()["RANK"])] = process
    return found


def first_failure(lines: list[str], code: int) -> RanksError:
    """From all that torchrun or srun printed: the rank that failed first, and its last words."""
    ended = _ended(lines)
    if mistake := next((words for words in last_words(lines) if words.startswith("error: ")), ""):  # of the user's
        return RanksError(mistake.removeprefix("error: "))
    if not ended:
        words = (last_words(lines) or [""])[0]
        return RanksError(
            words.splitlines()[-1] if words else f"it ended with exit code {code}", words or "\n".join(lines[-30:])
        )
    said = {rank: next((words for words in last_words(lines, rank) if not _is_lost(words)), "") for rank, _ in ended}
    lost = {rank for rank in said if not said[rank] and last_words(lines, rank)}  # it only says that others are gone
    rank, how = next((one for one in ended if one[0] not in lost), ended[0])
    words = said[rank] or (last_words(lines, rank) or [""])[0]
    return RanksError(f"rank {rank} {how}" + (f": {words.splitlines()[-1]}" if words else ""), words)


def _is_lost(words: str) -> bool:
    return bool(LOST.search(words.splitlines()[-1]))


def _ended(lines: list[str]) -> list[tuple[int, str]]:
    """Ranks that failed, and how; those first that the launcher saw first."""
    text = "\n".join(lines)
    summary = re.findall(r"rank\s+: (\d+) \(local_rank.*?exitcode\s+: (-?\d+)", text, re.DOTALL)
    seen = [(int(rank), int(code)) for rank, code in reversed(summary)]  # torchrun prints the first that it saw last
    seen = seen[:1] + [one for one in seen[1:] if one[1] != -signal.SIGTERM]  # by which it ends the rest
    found = [
        (rank, f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}") for rank, code in seen
    ]
    if "torch.distributed.elastic" in text:  # then Slurm's tasks are torchruns, not ranks
        return found
    tasks = re.findall(r"^srun: error: \S+ tasks? (\d+)\S*: (.+)", text, re.MULTILINE)
    return found + [(int(task), how.lower()) for task, how in tasks if how != "Terminated"]


def last_words(lines: list[str], rank: int | None = None) -> list[str]:
    """A rank's tracebacks and lines that begin with error, the oldest first; without a rank: everybody's."""
    number = r"\d+" if rank is None else str(rank)
    tags = re.compile(rf"(\[rank {number}\]|\s*{number}:|) ?(\[rank{number}\]: ?)?")  # torchrun's, srun's; torch's own
    said = [line[tag.end() :] for line in lines if (tag := tags.match(line)) and (rank is None or tag[1] or tag[2])]
    return re.findall(r"^(?:error: .+|Traceback .+(?:\n .*)*\n.+)", "\n".join(said), re.MULTILINE)
