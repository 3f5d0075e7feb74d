"""A whole training run on several ranks, as a subprocess of the notebook: ranks.torchrun(2, Config(strategy="ddp"))."""

import os
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

import psutil

from course_lib.config import Config
from course_lib.failures import first_failure
from course_lib.processes import clean_environment, kill_tree

GUARD = [sys.executable, "-m", "course_lib.guard", str(os.getpid())]  # what follows ends with this process
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # one a rank, and none that spins


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
