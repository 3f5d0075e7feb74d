"""Where a batch job is: asked of Slurm's controller, then of its accounting."""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from course_lib import processes
from course_lib.config import UserError

LOCAL = Path(__file__).parent.parent / "slurm" / "local"

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SUSPENDED", "UNKNOWN")
ACTIVE = (*WAITING, "RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")


@dataclass(frozen=True)
class Status:
    """Where a job is, as far as Slurm and the run's own log know."""

    state: str  # Slurm's word for it; UNKNOWN if Slurm does not answer, LOST if it has forgotten the job
    reason: str = ""  # why it is pending
    elapsed: str = ""  # days-hours:minutes:seconds
    limit: str = ""
    nodes: str = ""
    restarts: int = 0
    step: int = 0
    steps: int = 0
    max_rss_mb: float = 0.0
    ranks: int = 0
    loss: float | None = None

    @property
    def finished(self) -> bool:
        return self.state not in ACTIVE or self.reason == "DependencyNeverSatisfied"

    def __str__(self) -> str:
        where = f" on {self.nodes}" if self.nodes else ""
        if self.state in WAITING:
            return f"{self.state.lower()} ({self.reason or 'no reason yet'})"
        steps = f", step {self.step} of {self.steps}" if self.steps else ""
        again = f", queued again {self.restarts} time{'s' * (self.restarts > 1)}" if self.restarts else ""
        memory = f", {self.max_rss_mb:,.0f} MB in the largest rank" if self.max_rss_mb else ""
        after = f" after {self.elapsed}" if self.elapsed else ""  # Slurm may have forgotten it
        return f"{self.state.lower()}{where}{after}{steps}{again}{memory}"


def nodes() -> list[str]:
    """The names of Slurm's nodes; none if there is no Slurm here."""
    if not shutil.which("sinfo"):
        return []
    code, printed = processes.run(["sinfo", "--noheader", "--Node", "--format=%N"], timeout=60)
    if code != 0 and "configuration source" in printed:  # the programs are installed, and know of no cluster
        return []
    if code != 0:
        raise UserError(f"Slurm is installed, but does not answer: {processes.failure(code, printed, 60)}")
    return sorted(set(printed.split()))


def start_local() -> bool:
    """Start a Slurm on this machine, as `make cluster` does, where its packages are; whether that was possible."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if not all(shutil.which(program, path=path) for program in ("munged", "slurmctld", "slurmd", "sinfo")):
        return False
    code, printed = processes.run([str(LOCAL / "up.sh")], timeout=60)
    if code != 0:
        raise UserError(f"slurm/local/up.sh: {processes.failure(code, printed, 60)}")
    os.environ["SLURM_CONF"] = printed.strip().rpartition("=")[2]
    return True


def call(program: str, *words: str) -> tuple[int | None, str]:
    """Run one of Slurm's programs: (exit code, what it printed). A job may be known here from a machine that has them."""
    if not shutil.which(program):
        return 127, f"{program} is not installed here"
    return processes.run([program, *words], timeout=60)


def ask_controller(number: int, comment: str) -> dict | None:
    """None: it does not know such a job, or not any more."""
    code, printed = call("scontrol", "--oneliner", "show", "job", str(number))
    if code != 0 and "Invalid job id" not in printed:
        return {"state": "UNKNOWN", "reason": processes.failure(code, printed, 60)}
    found = dict(re.findall(r"(\w+)=(\S*)", printed))
    if found.get("Comment") != comment:  # numbers begin anew on another cluster
        return None
    return _known(
        *(found.get(name, "") for name in ("JobState", "Reason", "RunTime", "TimeLimit", "NodeList", "Restarts"))
    )


def ask_accounting(number: int, comment: str) -> dict | None:
    """Slurm itself forgets a job minutes after its end; its accounting does not, where there is one."""
    columns = "State,Reason,Elapsed,Timelimit,NodeList"
    look = ["--allocations", "--noheader", "--parsable2", f"--format={columns},Comment"]
    code, printed = call("sacct", f"--jobs={number}", *look)
    rows = [line.split("|") for line in printed.splitlines() if line.count("|") == 5]
    if code or not rows or rows[-1][-1] not in (comment, ""):  # few sites keep comments
        return None
    return _known(*rows[-1][:5])


def _known(state: str, reason: str, elapsed: str, limit: str, nodes: str, restarts: str = "") -> dict:
    nodes = "" if nodes.startswith(("(", "None")) else nodes  # (null), None assigned
    reason = "" if reason == "None" else reason
    known = {"state": state.split()[0], "reason": reason, "elapsed": elapsed, "limit": limit, "nodes": nodes}
    return known | {"restarts": int(restarts or 0)}
