"""What is here, what works, and what to do about the rest: one line a check, exit code 0 when the course can run.

python -m course_lib.doctor
python -m course_lib.doctor --timeout 120 --mpirun /opt/mpi/bin/mpirun

In a notebook: `from course_lib import doctor; doctor.report()`.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from course_lib.config import Config, run_main
from course_lib.machine import CHECKS, FAIL, OK, RANKS, SET_UP, WARN, Finding
from course_lib.ports import claim_ports, next_port
from course_lib.processes import failure, run

RIGHT = f"{RANKS} ranks added 8 MB of numbers each, and the sum is right"


def check_gloo(timeout: float = 60) -> Finding:
    """Real: two processes add their numbers, as DDP does with gradients."""
    probe = ["-m", "course_lib.doctor", "--probe", "gloo"]
    with claim_ports() as claim:
        shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next_port(claim))}
        ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
        code, output = run([sys.executable, *probe], timeout, environments=ranks)
    if code == 0 and output.count(RIGHT) == RANKS:
        return Finding(OK, "gloo", RIGHT)
    again = shlex.join([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *probe])
    advice = f"`unset GLOO_SOCKET_IFNAME`; `--timeout 180` where disks are slow; the whole error: `{again}`"
    return Finding(FAIL, "gloo", failure(code, output, timeout), advice)


def check_mpi(timeout: float = 60, mpirun: str = "") -> Finding:
    """Real: the same by MPI."""
    ours = Path(sys.executable).with_name("mpirun")
    mpirun = mpirun or (str(ours) if ours.exists() else "mpirun")
    command = [mpirun, "-n", str(RANKS), sys.executable, "-m", "mpi4py", "-m", "course_lib.doctor", "--probe", "mpi"]
    code, output = run(command, timeout)
    if code == 0 and output.count(RIGHT) == RANKS:
        return Finding(OK, "mpi", RIGHT)
    advice = f"use {ours}, which `make setup` brings; the whole error: `{shlex.join(command)}`"
    return Finding(FAIL, "mpi", failure(code, output, timeout), advice)


def examine(timeout: float = 60, mpirun: str = "") -> Iterator[Finding]:
    """Every finding as soon as it is there: the quick checks, then the real ones."""
    for check in CHECKS:
        yield _guarded(WARN, check)
    yield _guarded(FAIL, check_gloo, timeout)
    yield _guarded(FAIL, check_mpi, timeout, mpirun)


def report(timeout: float = 60, mpirun: str = "") -> bool:
    """Print one line a check; True when the course can run here."""
    failed = 0
    for status, name, found, advice in examine(timeout, mpirun):
        line = found if status == OK else f"{found} -> {advice}"
        print(f"{status:4}  {name:13}  {' '.join(line.split())}", flush=True)
        failed += status == FAIL
    print("The course cannot run here yet: mend what says FAIL." if failed else "The course can run here.", flush=True)
    return not failed


def probe(kind: str) -> int:
    """One rank of a real check: as much data as makes the library take its fast path."""
    if kind == "mpi":
        import numpy
        from mpi4py import MPI

        everyone = MPI.COMM_WORLD
        size, numbers = everyone.size, numpy.full(2**20, everyone.rank + 1.0)  # 8 MB
        everyone.Allreduce(MPI.IN_PLACE, numbers)
    else:
        import torch

        from course_lib.world import start, stop

        world = start(Config(device="cpu", timeout=30))
        size, numbers = world.world_size, torch.full((2**20,), world.rank + 1.0, dtype=torch.float64)  # 8 MB
        if size > 1:
            torch.distributed.all_reduce(numbers)
        stop(world)
    if size != RANKS:
        raise RuntimeError(
            f"a world of {size}, not of {RANKS}: each rank is alone, as under the launcher of another MPI"
        )
    if not (numbers == sum(range(1, RANKS + 1))).all():
        raise RuntimeError(f"the sum is wrong: {numbers}")
    print(RIGHT, flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m course_lib.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, default=60, help="seconds for each real check (default: 60)")
    parser.add_argument("--mpirun", default="", help="the launcher to try (default: the one beside this Python)")
    parser.add_argument("--probe", choices=["gloo", "mpi"], help="be one rank of a real check")
    options = parser.parse_args(arguments)
    if options.probe:
        return probe(options.probe)
    return 0 if report(options.timeout, options.mpirun) else 1


def _guarded(otherwise: str, check: Callable[..., Finding], *arguments) -> Finding:
    """A check that breaks is itself a finding."""
    try:
        return check(*arguments)
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return Finding(otherwise, name, f"{type(error).__name__}: {error}", SET_UP)


if __name__ == "__main__":
    run_main(main)
