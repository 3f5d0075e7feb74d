"""Batch jobs from a notebook: submitted once, watched, collected.

    from course_lib import jobs

    job = jobs.submit("04_ddp", nodes=2, epochs=5)   # sbatch --nodes=2 slurm/04_ddp.sbatch --epochs=5
    job                                              # where it is; in Lab it keeps itself up to date
    job.result()                                     # waits; what the run measured, or why it failed
    jobs.table()                                     # all jobs so far

What was asked for is the key: the same call, by Run All or after a kernel's restart, attaches to the job that is there, and
again=True submits a new one. Without Slurm the same script runs on this machine, for as long as the notebook's kernel lives.
"""

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from course_lib import cockpit, processes
from course_lib.config import UserError, as_flag
from course_lib.failures import JobError, why
from course_lib.metrics import read_log
from course_lib.scheduler import ACTIVE, WAITING, Status, ask_accounting, ask_controller, call, nodes, start_local
from course_lib.scores import NAMES
from course_lib.submission import HERE, ROOT, run_here, sbatch, split


def submit(script: str, *, again: bool = False, **asked) -> "Job":
    """Submit slurm/<script>.sbatch, unless the same was asked before: fields of Config are its flags, the rest is sbatch's."""
    there = sorted(path.stem for path in (ROOT / "slurm").glob("[0-9]*.sbatch"))
    if script not in there:
        raise UserError(f"{script!r} is no job: slurm/ has {', '.join(there)}")
    flags, options = split(asked)
    folder = Path(flags["runs"]) / "jobs"
    content = json.dumps([script, flags, options], sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:8]
    before = _read(folder / f"{key}.json")
    if before and not again and before.status().state != "LOST":
        cockpit.say(f"{before}: attached; again=True would submit it anew")
        return before
    attempt = before.attempt + 1 if before else 1
    label = f"{script}-{key}" + (f"-{attempt}" if attempt > 1 else "")
    flags.setdefault("name", label)
    log = folder / f"{label}.log"
    folder.mkdir(parents=True, exist_ok=True)
    for old in (log, log.with_suffix(".end")):
        old.unlink(missing_ok=True)
    words = [*options, f"slurm/{script}.sbatch", *(as_flag(name, value) for name, value in flags.items())]
    slurm, now = bool(nodes()), time.time()
    number = sbatch([f"--output={log}", f"--comment={key}", *words]) if slurm else run_here(words, log)
    run = str(Path(flags["runs"]) / flags["name"])
    job = Job(script, asked, number, key, slurm, attempt, now, run, str(log))
    _write(folder / f"{key}.json", vars(job))
    cockpit.say(f"{job}: submitted" if slurm else f"{job}: there is no Slurm here, so its ranks run on this machine")
    return job


def find_cluster() -> list[str]:
    """Slurm's nodes, for this notebook's jobs. Where Slurm is installed without a cluster, start one as make cluster does."""
    if not (found := nodes()) and start_local() and (found := nodes()):
        cockpit.say("started a Slurm on this machine; `make cluster-down` in a terminal stops it")
    cockpit.say(f"Slurm with nodes {', '.join(found)}" if found else "no Slurm here: jobs run as ranks on this machine")
    return found


def _read(path: Path) -> "Job | None":
    try:
        return Job(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # none, or one that an older course has written
        return None


def _write(path: Path, content: dict) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2, default=str))
    os.replace(part, path)


@dataclass(frozen=True)
class Job:
    """A job that was submitted. It is kept in runs/jobs/<key>.json, so that another notebook finds it again."""

    script: str
    asked: dict
    number: int
    key: str
    slurm: bool
    attempt: int
    submitted: float
    run: str
    log_file: str

    def __str__(self) -> str:
        return f"job {self.number} ({self.script})" if self.slurm else f"{self.script} (process {self.number})"

    def _ipython_display_(self) -> None:
        cockpit.show(self)

    def status(self) -> Status:
        """Ask Slurm, then its accounting, then what was known of its end, then the run's log."""
        events = self._events()
        facts = _facts(events)
        known = _ask_slurm(self) if self.slurm else _ask_process(self, events)
        if not known or (known["state"] == "UNKNOWN" and "loss" in facts):  # the log tells of an end
            known = {"state": "COMPLETED" if "loss" in facts else "LOST"}
        status, end = Status(**facts | known), Path(self.log_file).with_suffix(".end")
        if status.state in ("LOST", "UNKNOWN") and end.exists():
            return Status(**json.loads(end.read_text()))
        if status.state not in (*ACTIVE, "LOST") and not end.exists():
            _write(end, vars(status))
        return status

    def wait(self) -> Status:
        """Until it is finished, and say how far it is."""
        return cockpit.follow(self)

    def result(self) -> dict:
        """Wait for the job's end: the last evaluation and what the run took; a JobError says why it failed."""
        status = self.wait()
        if status.state != "COMPLETED":
            raise why(self, status)
        last = {event["event"]: event for event in self._events()}
        if "end" not in last:
            raise JobError(f"{self} is done, but its run has not come to an end: look at print(job.log())")
        used = {"ranks": status.ranks, "nodes": status.nodes, "elapsed": status.elapsed}
        used |= {name: last["end"][name] for name in ("step", "seconds", "max_rss_mb")}
        return (
            {name: value for name, value in last["eval"].items() if name in ("loss", "rmse", *NAMES)}
            | used
            | {"run": self.run}
        )

    def _events(self) -> list[dict]:
        """The run's log, without what an earlier job has left in a folder of the same name."""
        try:
            return [event for event in read_log(self.run) if event["time"] >= self.submitted]
        except FileNotFoundError:
            return []

    def log(self) -> str:
        """All that the job has printed so far."""
        path = Path(self.log_file)
        return path.read_text(errors="replace") if path.exists() else ""

    def cancel(self) -> None:
        """End it."""
        if not self.slurm:
            processes.kill_tree([HERE[self.number]] if self.number in HERE else [])
        elif self.status().state in ACTIVE:
            code, printed = call("scancel", str(self.number))
            if code != 0:
                raise JobError(f"{self} could not be cancelled: {processes.failure(code, printed, 60)}")


def _facts(events: list[dict]) -> dict:
    """What the run's log knows."""
    last = {event["event"]: event for event in events}
    facts: dict = {"step": max((event["step"] for event in events), default=0)}
    if "start" in last:
        facts |= {"steps": last["start"]["steps"], "ranks": last["start"]["world_size"]}
    if "end" in last:
        facts |= {"max_rss_mb": last["end"]["max_rss_mb"], "loss": last["eval"]["loss"]}
    return facts


def _ask_slurm(job: Job) -> dict | None:
    return ask_controller(job.number, job.key) or ask_accounting(job.number, job.key)


def _ask_process(job: Job, events: list[dict]) -> dict | None:
    process = HERE.get(job.number)
    code = process.poll() if process else None
    until = events[-1]["time"] if events and (code is not None or not process) else time.time()
    seconds = int(max(0, until - job.submitted))
    known = {"nodes": "this machine", "elapsed": f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"}
    if process:
        return known | {"state": "RUNNING" if code is None else "COMPLETED" if code == 0 else _ended(code)}
    return known | {"state": "COMPLETED"} if events and events[-1]["event"] == "end" else None


def _ended(code: int) -> str:
    return "CANCELLED" if code == -9 else "FAILED"


def table(runs: str | Path = ROOT / "runs") -> "cockpit.Table":
    """All jobs, the oldest first; what a job measured appears when it is finished."""
    found = [job for path in Path(runs).glob("jobs/*.json") if (job := _read(path))]
    rows = []
    for job in sorted(found, key=lambda job: job.submitted):
        status = job.status()
        asked = ", ".join(f"{name}={value}" for name, value in job.asked.items() if name not in ("data", "runs"))
        loss = "" if status.loss is None else f"{status.loss:.4f}"
        memory = f"{status.max_rss_mb:,.0f}" if status.max_rss_mb else ""
        steps = f"{status.step} / {status.steps}" if status.steps else ""
        state = f"{status.state.lower()} {status.reason if status.state in WAITING else ''}".strip()
        where = (status.nodes, status.ranks or "", steps, status.elapsed)
        rows.append((job.script, job.number, asked, state, *where, memory, loss))
    titles = ("job", "number", "asked", "state", "nodes", "ranks", "steps", "elapsed", "MaxRSS (MB)", "validation loss")
    return cockpit.Table(titles, rows)
