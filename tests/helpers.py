"""What several test files need: equality to the last bit, real ranks, a real Slurm, a prefetcher's threads, waiting."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from course_lib import checkpoint, processes
from course_lib.config import Config
from course_lib.metrics import read_log

torch.set_num_threads(1)  # as every rank does; the sums then always run in the same order

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parent.parent
LOCAL = ROOT / "slurm" / "local"
LAUNCH_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
)


def assert_same(a, b, where: str = "") -> None:
    """Equal to the last bit, however nested: same keys, same types, same tensors."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, Mapping):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for number, pair in enumerate(zip(a, b)):
            assert_same(*pair, f"{where}[{number}]")
    else:
        assert a == b, where


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def wait_until(condition: Callable[[], bool], *, seconds: float = 120, every: float = 0.005) -> None:
    """Poll; what does not come true in good time is a failure, never a hang."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(every)


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return clean | {"PATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | variables


# A cell's code: how its kernel is reached, "tcp" or "ipc".
REACHED_BY = """
import json, ipykernel
with open(ipykernel.get_connection_file()) as file:
    reached_by = json.load(file)["transport"]
"""


def torchrun(ranks: int, *words: object) -> tuple[int, str]:
    """Run a program on so many ranks to its end: (exit code, all that was printed). A hang is a failure."""
    forking = Path(__file__).with_name("forking_torchrun.py")
    launcher = [sys.executable, str(forking), "--standalone", f"--nproc-per-node={ranks}"]
    code, output = processes.run([*launcher, *map(str, words)], timeout=240)
    assert code is not None, f"the ranks hang:\n{output}"
    return code, output


def result(config: Config) -> dict:
    """All that must be equal of two equal runs: what a checkpoint holds, and what was logged of losses and metrics."""
    content = checkpoint.load(config.run / "checkpoint.pt")
    content.pop("config")
    content.pop("launch")
    timing = ("time", "samples_per_s", "wait_share")
    events = [event for event in read_log(config.run) if event["event"] in ("step", "eval")]
    return content | {"log": [{k: v for k, v in event.items() if k not in timing} for event in events]}


def cluster_script(name: str, folder: Path) -> str:
    """slurm/local/up.sh or down.sh."""
    done = subprocess.run([LOCAL / name, folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# A process of nobody's: a worker that is interrupted is given ten seconds, and down.sh may need more.
STOP_WITH = 'while [[ -d /proc/$0 && -d $2 ]]; do sleep 1; done; "$1" "$2"; rm -rf "$2"'


@contextmanager
def start_cluster() -> Iterator[Path]:
    """The folder of a running Slurm with two nodes; a short path, for it holds sockets. It ends with this process at last."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    watch = ["setsid", "--fork", "bash", "-c", STOP_WITH, str(os.getpid()), LOCAL / "down.sh", folder]
    subprocess.run(watch, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        cluster_script("up.sh", folder)
        yield folder
    finally:
        cluster_script("down.sh", folder)
        shutil.rmtree(folder, ignore_errors=True)


def use_slurm(patch: pytest.MonkeyPatch, configuration: Path) -> None:
    """Let course_lib.jobs find this Slurm."""
    patch.setenv("SLURM_CONF", str(configuration))
    patch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")  # the jobs' Python, should there be no .venv


def use_no_slurm(patch: pytest.MonkeyPatch, path: str) -> None:
    """Let it find none: `path` has no program of Slurm's."""
    patch.setenv("PATH", path)
    patch.delenv("SLURM_CONF", raising=False)


def wait_until_idle(folder: Path, *, seconds: float = 240) -> None:
    """Until this Slurm has no job any more. Not all the time: every question is a program that is started."""

    def is_idle() -> bool:
        queue = ask(folder, "squeue", "--noheader")
        assert "(PartitionTimeLimit)" not in queue, f"one can never start:\n{queue}"
        return not queue

    wait_until(is_idle, seconds=seconds, every=0.5)


def remove_logs(folder: Path) -> None:
    """What the sweeps of this Slurm have left in runs/; another's logs stay."""
    for number in re.findall(r"JobId=(\d+)", ask(folder, "scontrol", "--oneliner", "show", "job")):
        for log in (ROOT / "runs").glob(f"sweep*-{number}.log"):
            log.unlink()


def ask(folder: Path, *command: object) -> str:
    """What a command prints that talks to the Slurm of this folder."""
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout
