"""What is on this machine: a line for each thing that the course needs, found by looking only. The doctor asks, and tries.

A check returns a Finding: OK, WARN (the course runs, but …) or FAIL, with what to do about it.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from course_lib.config import Config
from course_lib.processes import failure, run

OK, WARN, FAIL = "OK", "WARN", "FAIL"
PACKAGES = ("torch", "numpy", "netCDF4", "h5py", "jupyterlab", "ipyparallel", "mpi4py", "matplotlib", "papermill")
SET_UP = "`make setup` (in a notebook, then choose the kernel of the course's .venv)"
RANKS, GB = 2, 1e9


class Finding(NamedTuple):
    """One line of the report. The advice is shown unless all is well."""

    status: str
    name: str
    found: str
    advice: str = ""


def check_python() -> Finding:
    from packaging.specifiers import SpecifierSet

    found, needed = platform.python_version(), importlib.metadata.metadata("course_lib")["Requires-Python"]
    status = OK if SpecifierSet(needed).contains(found, prereleases=True) else FAIL
    return Finding(status, "python", f"{found}, {sys.executable}", f"install a Python {needed}, then {SET_UP}")


def check_packages(names: Sequence[str] = PACKAGES) -> Finding:
    from packaging.requirements import Requirement

    needed = {item.name: item.specifier for item in map(Requirement, importlib.metadata.requires("course_lib"))}
    right, wrong = [], []
    for name in names:
        try:
            version = importlib.metadata.version(name)
            if name in ("netCDF4", "h5py"):  # each brings its own HDF5; a cluster's module that comes first breaks it
                importlib.import_module(name)
        except (ImportError, OSError) as error:
            wrong.append(f"{name} is missing or broken ({error})")
            continue
        fits = name not in needed or needed[name].contains(version, prereleases=True)
        right.append(f"{name} {version}") if fits else wrong.append(f"{name} {version} is not {needed[name]}")
    return Finding(FAIL if wrong else OK, "packages", ", ".join(wrong or right), SET_UP)


def count_cores() -> float:
    """CPUs that this process may use; a container's quota may be a part of one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = _control_groups("cpu.max")  # version 2 writes "quota period" in one file, version 1 in two
    quotas += [a + b for a, b in zip(_control_groups("cpu.cfs_quota_us"), _control_groups("cpu.cfs_period_us"))]
    return min([cores, *(int(quota) / int(period) for quota, period in quotas if quota not in ("max", "-1"))])


def check_cores() -> Finding:
    cores = count_cores()
    advice = "all runs, but no speed-up will show: `--cpus-per-task=2` (Slurm), `--cpus=2` (Docker)"
    found = f"{cores:g} of the machine's {os.cpu_count()} for this process"
    return Finding(OK if cores >= RANKS else WARN, "cores", found, advice)


def check_gpus() -> Finding:
    import torch

    if count := torch.cuda.device_count():
        return Finding(OK, "gpus", ", ".join(torch.cuda.get_device_name(index) for index in range(count)))
    if shutil.which("nvidia-smi") and "GPU 0" in (seen := run(["nvidia-smi", "-L"], timeout=10)[1]):
        advice = "the course runs on CPU ranks; for more, install the torch build that fits the driver"
        return Finding(WARN, "gpus", f"torch {torch.__version__} cannot use {seen.splitlines()[0]}", advice)
    return Finding(OK, "gpus", "none: the course runs on CPU ranks")


def check_memory() -> Finding:
    import psutil

    limits = _control_groups("memory.max") + _control_groups("memory.limit_in_bytes")
    free = min([psutil.virtual_memory().available, *(int(words[0]) for words in limits if words[0] != "max")]) / GB
    advice = "close other kernels and programs; `--mem=4G` (Slurm), `--memory=4g` (Docker)"
    return Finding(OK if free >= 2 else WARN if free >= 0.5 else FAIL, "memory", f"{free:.1f} GB available", advice)


def check_shared_memory(folder: str = "/dev/shm") -> Finding:
    if not Path(folder).is_dir():
        return Finding(OK, "shared memory", f"no {folder}: {platform.system()} does without")
    free = shutil.disk_usage(folder).free / GB
    advice = "DataLoader workers may die of a bus error: keep `--workers 0`, or start Docker with `--shm-size=2g`"
    return Finding(OK if free >= 0.5 else WARN, "shared memory", f"{free:.2f} GB free in {folder}", advice)


def check_disk(folders: Sequence[str] = (Config().runs, Config().data)) -> Finding:
    paths = [Path(folder).absolute() for folder in folders]
    there = [next(place for place in (path, *path.parents) if place.exists()) for path in paths]
    free = [shutil.disk_usage(place).free / GB for place in there]
    found = ", ".join(f"{size:.1f} GB free for {folder}" for size, folder in zip(free, folders))
    advice = "delete old runs (`rm -r runs/*`), or go elsewhere with `--runs DIR` and `--data DIR`"
    return Finding(OK if min(free) >= 2 else WARN if min(free) >= 0.5 else FAIL, "disk", found, advice)


def check_ports(count: int = 8) -> Finding:
    try:
        with ExitStack() as stack:  # all open at once, as several groups of ranks would have them
            servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
            return Finding(OK, "ports", f"{len({server.getsockname() for server in servers})} opened on 127.0.0.1")
    except OSError as error:
        return Finding(FAIL, "ports", f"cannot listen on 127.0.0.1: {error}", "bring it up: `sudo ip link set lo up`")


def check_open_files() -> Finding:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    status = OK if soft >= 1024 or soft == resource.RLIM_INFINITY else WARN
    return Finding(status, "open files", f"limit {soft}", "`ulimit -n 4096` in the shell that starts Jupyter")


def check_slurm(timeout: float = 5) -> Finding:
    job = f"; this process is in job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    if not (sinfo := shutil.which("sinfo")):
        return Finding(OK, "slurm", f"none: jobs run as local ranks{job}")
    code, output = run([sinfo, "--noheader", "--format=%P %D %T"], timeout)  # partition, number of nodes, their state
    if code == 0:
        return Finding(OK, "slurm", f"{'; '.join(output.splitlines()[:4]) or 'no partition'}{job}")
    advice = "`scontrol ping` shows who is asked, SLURM_CONF sets it; until it answers, jobs run as local ranks"
    return Finding(WARN, "slurm", f"{sinfo} {failure(code, output, timeout)}{job}", advice)


def check_mpirun() -> Finding:
    ours, first = Path(sys.executable).with_name("mpirun"), shutil.which("mpirun")
    if not ours.exists():
        found = f"{first}, which did not come with this Python" if first else "none"
        return Finding(WARN if first else FAIL, "mpirun", found, f"fine if mpi is OK below; else {SET_UP}")
    if first and not os.path.samefile(first, ours):
        return Finding(WARN, "mpirun", f"{first} hides {ours}", f'`export PATH="{ours.parent}:$PATH"`')
    return Finding(OK, "mpirun", f"{ours}" + ("" if first else " (not on PATH: type all of it, or activate the .venv)"))


def _control_groups(file: str, table: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> list[list[str]]:
    """The words of this file in the process's control group and in those above it: each may set a limit."""
    found = []
    for line in Path(table).read_text().splitlines() if Path(table).exists() else []:
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        root = Path(mount, controllers)
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / file).is_file():
                found.append((folder / file).read_text().split())
    return found


CHECKS = [check_python, check_packages, check_cores, check_gpus, check_memory, check_shared_memory, check_disk]
CHECKS += [check_ports, check_open_files, check_slurm, check_mpirun]
