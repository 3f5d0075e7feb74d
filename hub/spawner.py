"""A learner's server is a Slurm job: what may be asked for, the job's script, and what the learner is told while it waits."""

import asyncio
import os
import re
import shlex
import signal
import time
from contextlib import suppress

import batchspawner
from batchspawner.batchspawner import JobStatus
from markupsafe import escape
from tornado import web
from traitlets import Any, Unicode

from hub import port  # noqa: F401  what a server tells the hub

JOB = """#!/bin/bash
#SBATCH --job-name=jupyter
#SBATCH --chdir={{homedir}}
#SBATCH --output={{homedir}}/.course-server.log
#SBATCH --export={{keepvars}}
#SBATCH --no-requeue
#SBATCH --time={{runtime}}
{% for option in sbatch %}#SBATCH {{option}}
{% endfor %}
umask 077
export PATH={{venv}}/bin:$PATH
who=learners
[ ! -r {{published}}/teachers ] || who=teachers
course={{published}}/$who
export JUPYTER_CONFIG_PATH=$JUPYTER_CONFIG_PATH:$course/hub/$who  # of Lab: learners don't see a teacher's menus
python $course/hub/pull.py $course {{homedir}}/course {{venv}} {{data}} || exit 1
cd {{homedir}}/course || exit 1
runtime=${TMPDIR:-/tmp}/course-server-$UID  # of this node: the home may be full
if jobs=$(squeue -h -u "$UID" -o %A); then  # a server that was killed leaves its own
    for old in "$runtime"-*; do
        grep -qxF "$(basename "$old" | cut -d- -f4)" <<<"$jobs" || rm -rf "$old"
    done
fi
JUPYTER_RUNTIME_DIR=$(mktemp -d "$runtime-$SLURM_JOB_ID-XXXXXX") || exit 1
export JUPYTER_RUNTIME_DIR
export SLURM_JOB_NAME=interactive  # so Lightning does not take a kernel for one of srun's ranks
trap 'rm -r "$JUPYTER_RUNTIME_DIR"' EXIT
trap : TERM  # the server ends first
{{cmd}}
"""
PATIENCE = 60.0  # seconds until a question to Slurm counts as not answered
AGAIN = (2, 5, 15)  # seconds after which a job is cancelled again, where Slurm did not answer
# Slurm's words for a job that waits, in a learner's words.
REASONS = {
    "Resources": "the cluster is full; it starts as soon as a node is free",
    "Priority": "the cluster is full, and others came before",
    "PartitionTimeLimit": "it asks for more hours than this queue gives: stop it, and choose fewer",
    "ReqNodeNotAvail": "its nodes are down, or reserved for others",
    "None": "Slurm has just taken it",
    "(null)": "Slurm has just taken it",
}


class CourseSpawner(batchspawner.SlurmSpawner):
    """Profile and hours are chosen from the site's lists; nothing else of what a browser sends is used."""

    site = Any(config=True)
    req_venv = Unicode(config=True)
    req_data = Unicode(config=True)
    req_published = Unicode(config=True)
    req_sbatch = Any()
    submitted = ""
    abandoned = False  # the hub was restarted before this server was there
    batch_query_cmd = Unicode("squeue -h -j {job_id} -o '%T|%B|%r'")
    state_exechost_re = Unicode(r"^\w+\|([^|]+)")
    # One that is COMPLETING serves nobody, and its learner may start another.
    state_running_re = Unicode(r"^(?:RUNNING|SUSPENDED|RESIZING|SIGNALING|STOPPED)\|")
    state_pending_re = Unicode(r"^(?:PENDING|CONFIGURING|REQUEUED|REQUEUE_HOLD|RESV_DEL_HOLD)\|")
    # Whatever keeps Slurm from answering, a server is lost only if Slurm says so.
    state_unknown_re = Unicode(r"(?s)^(?!$)(?![A-Z_]+\|)(?!.*Invalid job id)")
    batch_script = Unicode(JOB)

    def options_form(self, spawner) -> str:
        slurm = self.site.slurm
        profiles = "".join(_radio("profile", one.name, one.title, not k) for k, one in enumerate(self.site.profiles))
        hours = "".join(
            _radio("hours", hour, f"{hour} hour{'s' * (hour > 1)}", not k) for k, hour in enumerate(slurm.hours)
        )
        return (
            f"<fieldset><legend>What you need</legend>{profiles}</fieldset>"
            f"<fieldset><legend>For how long</legend>{hours}</fieldset>"
            "<p>Your server is a job in the cluster's queue. When its time is over it ends; your files stay.</p>"
        )

    def options_from_form(self, form: dict) -> dict:
        return {name: form.get(name, [""])[0] for name in ("profile", "hours")}

    def options_from_query(self, query: dict) -> dict:
        """A link on another site must not start a server: the form, which has a token against that, is shown instead."""
        raise web.HTTPError(400, "choose here, and press Start")

    def chosen(self) -> tuple:
        """Profile and hours, or a 400: the API takes options from anybody who has a token."""
        asked, slurm = self.user_options or {}, self.site.slurm
        profile = asked.get("profile") or self.site.profiles[0].name
        hours = str(asked.get("hours") or slurm.hours[0])
        if asked.keys() - {"profile", "hours"} or profile not in [one.name for one in self.site.profiles]:
            raise web.HTTPError(400, "choose a profile from the list")
        if hours not in map(str, slurm.hours):
            raise web.HTTPError(400, f"choose hours from the list: {', '.join(map(str, slurm.hours))}")
        return self.site.profile(profile), int(hours)

    async def start(self):
        profile, hours = self.chosen()
        slurm = self.site.slurm
        self.req_runtime = f"{hours:02d}:00:00"
        places = [f"--partition={slurm.partition}"] if slurm.partition else []
        places += [f"--account={slurm.account}"] if slurm.account else []
        self.req_sbatch = [*places, *profile.options.split()]
        self.user_options = {"profile": profile.name, "hours": str(hours)}
        deadline = time.monotonic() + 60 * slurm.start_minutes
        ran, starting = False, asyncio.ensure_future(super().start())
        try:
            while not (await asyncio.wait({starting}, timeout=2))[0] and time.monotonic() < deadline:
                ran = ran or bool(self.state_isrunning())  # once it runs, super() asks Slurm no more
                if ran and await self.query_job_status() == JobStatus.NOTFOUND:
                    raise RuntimeError("super() would wait for its port until start_minutes are over")
            if starting.done():
                return starting.result()
        except RuntimeError as error:
            why = await self.why_it_ended() if self.submitted else error
            raise _told(f"Slurm did not start your server: {why}", self.submitted) from error
        finally:
            starting.cancel()
        waited = f"Your server was not there after {slurm.start_minutes} minutes, so its job was cancelled."
        raise _told(f"{waited} Last heard: “{self.state_in_words()}”.", self.job_id)

    async def submit_batch_script(self) -> str:
        """Who waits may be gone before Slurm has answered; a job that nobody knows must not stay."""
        self.user.db.commit()
        self.submitted = ""  # job_id is forgotten when the job has ended
        submitting = asyncio.ensure_future(super().submit_batch_script())
        try:
            self.submitted = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            self.withdrawal = asyncio.ensure_future(self.withdraw(submitting))
            raise
        self.abandoned = False
        self.orm_spawner.state = self.get_state() | {"starting": True}  # if the hub is restarted now, it knows the job
        self.user.db.commit()
        return self.submitted

    async def withdraw(self, submitting: asyncio.Future) -> None:
        with suppress(RuntimeError):
            job = await submitting
            await self.ask_as_learner(f"scancel {job}")

    async def stop(self, now: bool = False) -> None:
        """Slurm may be too busy to answer; a job that is not cancelled would be nobody's."""
        for pause in (*AGAIN, None):
            try:
                return await super().stop(now)
            except RuntimeError as error:
                if "Invalid job id" in str(error):
                    return None
                if pause is None:
                    raise
                await asyncio.sleep(pause)

    def load_state(self, state: dict) -> None:
        super().load_state(state)
        self.abandoned = state.get("starting", False)

    async def poll(self):
        """Nobody waits any more for a server that had not started when the hub was restarted: its job is cancelled."""
        status = await super().poll()
        if status is None and self.abandoned:
            with suppress(RuntimeError):  # Slurm does not answer, and is asked again
                await self.stop()
                return 1
        return status

    async def why_it_ended(self) -> str:
        """Only a job that had a node has written its log; what is there may be the last server's."""
        with suppress(RuntimeError):
            told = await self.ask_as_learner(f"squeue -h -t all -j {self.submitted} -o '%T|%N'")
            state, _, nodes = told.partition("|")
            if state and not nodes:
                return f"its job was ended before it had a node ({state})."
        return f"its job ended at once. {await self.last_words()}"

    async def last_words(self) -> str:
        """The last line of the job's log. The learner reads it, not root, and however long it is, no more than its end."""
        home = self.get_req_subvars()["homedir"]
        name = f"{home}/.course-server.log"
        with suppress(RuntimeError, IndexError):
            if said := (await self.ask_as_learner(f"timeout 5 tail -c 300 {shlex.quote(name)}")).splitlines():
                return f"It said: “{said[-1]}”."
            if (await self.ask_as_learner(f"timeout 5 df --output=avail {shlex.quote(home)}")).split()[-1] == "0":
                return "Your home is full: remove files there, or ask for more room."
        return f"What it said is in {name}."

    async def ask_as_learner(self, command: str) -> str:
        prefix = batchspawner.format_template(self.exec_prefix, **self.get_req_subvars())
        return await self.run_command(f"{prefix} {command}")

    async def run_command(self, cmd, input=None, env=None):
        """The learner sees the environment of what runs in their name: of the hub's own it has only what a server may know.

        Every failure is a RuntimeError with a text: without one it would look like Slurm's answer for a job that has ended."""
        known = {name: os.environ[name] for name in self.env_keep if name in os.environ}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        try:
            program = await asyncio.create_subprocess_shell(
                cmd, env=known if env is None else env, start_new_session=True, **pipes
            )
            try:
                async with asyncio.timeout(PATIENCE):
                    out, error = await program.communicate((input or "").encode())
            finally:
                if program.returncode is None:  # nobody waits any more; runuser alone would leave its child behind
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(program.pid, signal.SIGKILL)
                        await program.wait()
            if program.returncode:
                raise RuntimeError(error.decode(errors="replace").strip())
            return out.decode(errors="replace").strip()
        except (OSError, RuntimeError, ValueError) as error:
            self.log.error("%s: %s", cmd, error)
            raise RuntimeError(str(error) or "no answer") from error

    async def progress(self):
        told = None
        while True:
            message = self.state_in_words()
            if message != told:
                yield {"message": message}
                told = message
            if self.state_isrunning():
                return
            await asyncio.sleep(1)

    def state_in_words(self) -> str:
        if not self.job_id:
            return "Asking Slurm for a job …"
        if self.state_isrunning():
            return f"Job {self.job_id} runs on {self.state_gethost()}. Your server starts there …"
        reason = self.job_status.rpartition("|")[2] if self.state_ispending() else ""
        if re.match(r"QOS|Assoc", reason):
            told = f"a limit of your account is reached ({reason}); end other jobs of yours, or ask"
        else:
            told = REASONS.get(reason.partition(",")[0], reason or "Slurm is asked")
        return f"Job {self.job_id} waits in the queue: {told} …"


def _radio(name: str, value: object, title: str, checked: bool) -> str:
    mark = " checked" if checked else ""
    return (
        f'<div class="radio"><label><input type="radio" name="{name}" value="{escape(value)}"{mark}> '
        f"{escape(title)}</label></div>"
    )


def _told(message: str, job: str) -> Exception:
    """An error that JupyterHub shows to the learner as it is."""
    error = RuntimeError(message)
    error.jupyterhub_message = f"{message} Try again, or ask your instructor (job {job or 'none'})."
    return error
