"""A whole training run on several ranks, as a subprocess of the notebook: ranks.torchrun(2, Config(strategy="ddp"))."""

import os
import re
import signal
import subprocess
import sys
from collections import deque
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
        return [*self.details.splitlines(), f"RanksError: {self}"]


def torchrun(n: int, config: Config, *, quiet: bool = False) -> Path:
    """Train on n ranks of this machine by torchrun; lines are tagged by rank as they come. Returns the run's folder."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", "--tee=3"]
    command = [*GUARD, *launcher, "-m", "course_lib.train", *config.arguments()]
    environment = clean_environment() | ONE_THREAD | {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] "}
    environment |= {"COURSE_PLAIN": "1", "PYTHONUNBUFFERED": "1"}
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
    return config.run


def first_failure(lines: list[str], code: int) -> RanksError:
    """From all that torchrun printed: the rank that failed first, and its last words."""
    seen = re.findall(r"rank\s*: (\d+) \(.*?exitcode\s*: (-?\d+)", "\n".join(lines), re.DOTALL)
    if not seen:
        return RanksError(f"torchrun ended with exit code {code}", "\n".join(lines[-30:]))
    root, *others = reversed([(int(rank), int(code)) for rank, code in seen])  # torchrun prints the first it saw last
    ended = [root, *(other for other in others if other[1] != -signal.SIGTERM)]  # which torchrun sends to the rest
    rank, code = next((one for one in ended if not LOST.search(last_words(lines, one[0])[-1])), root)
    details = last_words(lines, rank)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return RanksError(f"rank {rank} {how}{details[-1] and ': '}{details[-1]}", "\n".join(details))


def last_words(lines: list[str], rank: int) -> list[str]:
    """A rank's traceback, or its line that begins with error; [""] if it said neither."""
    tags = re.compile(rf"\[rank {rank}\] (\[rank{rank}\]: ?)?")  # torchrun's, and torch's own for a traceback
    said = [line[tag.end() :] for line in lines if (tag := tags.match(line))]
    begins = [number for number, line in enumerate(said) if line.startswith(("Traceback", "error: "))]
    return said[begins[0] :] if begins else [""]
