"""How a job is handed over: what was asked becomes flags and options, for sbatch or for slurm/local/run.sh on this machine."""

import difflib
import re
import subprocess
from pathlib import Path

import psutil

from course_lib import processes
from course_lib.config import FIELDS, Config, UserError
from course_lib.launch import GUARD

ROOT = Path(__file__).parent.parent
OPTIONS = """account begin constraint cpus_per_task deadline dependency exclude exclusive gpus gpus_per_node
gpus_per_task gres hold job_name licenses mail_type mail_user mem mem_per_cpu mem_per_gpu nice nodelist nodes ntasks
ntasks_per_node partition qos requeue reservation signal time tmp""".split()  # noqa: SIM905
SITE = 'cd "$0" && source slurm/site.sh && exec "$@"'  # what a site sets for sbatch counts here too
HERE: dict[int, psutil.Popen] = {}  # jobs that run without Slurm, by their number


def split(asked: dict) -> tuple[dict, list[str]]:
    """What was asked, as flags of course_lib.train with whole paths, and as options of sbatch."""
    unknown = sorted(set(asked) - set(FIELDS) - set(OPTIONS))
    if unknown:
        near = difflib.get_close_matches(unknown[0], [*FIELDS, *OPTIONS], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{unknown[0]} is neither a flag of course_lib.train nor an option of sbatch{hint}")
    flags = {name: value for name, value in asked.items() if name in FIELDS}
    Config(**flags)  # or it says what is wrong with them
    flags["runs"] = str(Path(flags.get("runs", ROOT / "runs")).resolve())  # the job starts in another folder
    if "data" in flags:
        flags["data"] = str(Path(flags["data"]).resolve())
    options = {name.replace("_", "-"): value for name, value in sorted(asked.items()) if name in OPTIONS}
    wanted = {name: value for name, value in options.items() if value is not None and value is not False}
    return flags, [f"--{name}" if value is True else f"--{name}={value}" for name, value in wanted.items()]


def sbatch(words: list[str]) -> int:
    """Submit it; the job's number."""
    command = ["bash", "-c", SITE, str(ROOT), "sbatch", "--parsable", *words]
    code, printed = processes.run(command, timeout=60)
    number = re.search(r"^(\d+)(;\S+)?$", printed, re.MULTILINE)
    if code or not number:
        raise UserError(f"sbatch refused the job: {processes.failure(code, printed, 60)}")
    return int(number[1])


def run_here(words: list[str], log: Path) -> int:
    """Start it on this machine, for as long as this process lives; the number of the process."""
    with open(log, "wb") as file:
        process = psutil.Popen(
            [*GUARD, str(ROOT / "slurm/local/run.sh"), *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=processes.clean_environment() | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # the stop button interrupts the kernel's whole group, and should only end the waiting
        )
    HERE[process.pid] = process
    return process.pid
