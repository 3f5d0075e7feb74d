"""Starting other processes so that nothing is inherited by accident and nothing is left behind."""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil


def clean_environment() -> dict[str, str]:
    """The environment without Slurm's and MPI's marks: inside a job, children would take themselves for parts of it."""
    inside = re.compile(r"(SLURM|SBATCH|PMI\w*|OMPI)_(?!CONF$|ALLOW_RUN_AS_ROOT)")
    return {name: value for name, value in os.environ.items() if not inside.match(name)}


def run(command: list[str], timeout: float, environments: Sequence[dict] = ({},)) -> tuple[int | None, str]:
    """Run a command once an environment, side by side: (exit code, None when time was up; all that was printed)."""
    inherited = clean_environment()
    until, processes = time.monotonic() + timeout, []
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a pipe could be held open by a grandchild
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        try:
            for extra in environments:
                processes.append(psutil.Popen(command, env=inherited | extra, **streams))
            codes = [process.wait(max(0, until - time.monotonic())) for process in processes]
            code = next((code for code in codes if code), 0)
        except psutil.TimeoutExpired:
            code = None
        finally:
            kill_tree(processes)
        output.seek(0)
        return code, output.read()


def kill_tree(processes: Sequence[psutil.Popen]) -> None:
    """End what still runs of these, with all that they have started."""
    left = [process for process in processes if process.poll() is None]
    left += [child for process in left for child in process.children(recursive=True)]
    for process in left:  # one by one: a launcher's ranks may be in sessions of their own
        with suppress(psutil.NoSuchProcess):
            process.kill()
    until = time.monotonic() + 5
    while any(map(_is_alive, left)) and time.monotonic() < until:
        time.sleep(0.01)
    for process in processes:
        process.poll()  # ours to reap; an orphan's zombie is up to init, which may take its time


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def failure(code: int | None, output: str, timeout: float) -> str:
    """What went wrong, and the last line that says why."""
    lines = re.findall(r"\w+(?:Error|Exception): .+", output) or re.findall(r".*\w.*", output) or ["it printed nothing"]
    return f"{f'no answer in {timeout:g} s' if code is None else f'exit code {code}'}: {lines[-1].strip()[:300]}"
