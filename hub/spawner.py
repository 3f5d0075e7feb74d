"""A learner's server is a Slurm job: what may be asked for, the job's script, and what the learner is told while it waits."""

import asyncio
import json
import os
import shlex

import batchspawner
from batchspawner.batchspawner import JobStatus
from jupyterhub.apihandlers import APIHandler, default_handlers
from markupsafe import escape
from tornado import web
from traitlets import Any, Unicode

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
rm -rf "${TMPDIR:-/tmp}/course-server-$UID-"*  # of a server that was killed
JUPYTER_RUNTIME_DIR=$(mktemp -d -t "course-server-$UID-XXXXXX") || exit 1  # of this node: the home may be full
export JUPYTER_RUNTIME_DIR
trap 'rm -r "$JUPYTER_RUNTIME_DIR"' EXIT
trap : TERM  # the server ends first
{{cmd}}
"""
# Slurm's words for a job that waits, in a learner's words.
REASONS = {
    "Resources": "the cluster is full; it starts as soon as a node is free",
    "Priority": "the cluster is full, and others came before",
    "None": "Slurm has just taken it",
    "(null)": "Slurm has just taken it",
}


class PortHandler(APIHandler):
    """A server tells the port that it has found on its node. batchspawner's own takes any attribute of the spawner: as root."""

    def post(self):
        token = self.get_auth_token()
        servers = self.current_user.spawners.values() if hasattr(self.current_user, "spawners") else ()
        server = next((one for one in servers if token and one.api_token == token), None)
        if server is None:
            raise web.HTTPError(403)
        try:
            port = json.loads(self.request.body)["port"]
        except (ValueError, KeyError, TypeError):
            port = None
        if type(port) is not int or not 1024 <= port < 65536:
            raise web.HTTPError(400, "one word is expected, port, and a number between 1024 and 65535")
        server.port = port
        self.set_status(201)


default_handlers[:] = [one for one in default_handlers if one[0] != r"/api/batchspawner"]
default_handlers.append((r"/api/batchspawner", PortHandler))


class CourseSpawner(batchspawner.SlurmSpawner):
    """Profile and hours are chosen from the site's lists; nothing else of what a browser sends is used."""

    site = Any(config=True)
    req_venv = Unicode(config=True)
    req_data = Unicode(config=True)
    req_published = Unicode(config=True)
    req_sbatch = Any()
    submitted = ""
    batch_query_cmd = Unicode("squeue -h -j {job_id} -o '%T|%B|%r'")
    state_exechost_re = Unicode(r"^\w+\|([^|]+)")
    # One that is COMPLETING serves nobody, and its learner may start another.
    state_running_re = Unicode(r"^(?:RUNNING|SUSPENDED)\|")
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
        starting = asyncio.ensure_future(super().start())
        try:
            while not (await asyncio.wait({starting}, timeout=2))[0]:
                if self.state_isrunning() and await self.query_job_status() == JobStatus.NOTFOUND:
                    raise RuntimeError("super() would wait for its port until start_minutes are over")
            return starting.result()
        except RuntimeError as error:
            why = f"its job ended at once. {await self.last_words()}" if self.submitted else error
            raise _told(f"Slurm did not start your server: {why}", self.submitted) from error
        finally:
            starting.cancel()

    async def submit_batch_script(self) -> str:
        self.submitted = ""  # job_id is forgotten when the job has ended
        self.submitted = await super().submit_batch_script()
        return self.submitted

    async def last_words(self) -> str:
        """The last line of the job's log. The learner reads it, not root, and however long it is, no more than its end."""
        words = self.get_req_subvars()
        name = f"{words['homedir']}/.course-server.log"
        command = f"{batchspawner.format_template(self.exec_prefix, **words)} timeout 5 tail -c 300 {shlex.quote(name)}"
        try:
            return f"It said: “{(await self.run_command(command)).splitlines()[-1]}”."
        except (RuntimeError, UnicodeDecodeError, IndexError):
            return f"What it said is in {name}."

    async def run_command(self, cmd, input=None, env=None):
        """The learner sees the environment of what runs in their name: of the hub's own it has only what a server may know."""
        known = {name: os.environ[name] for name in self.env_keep if name in os.environ}
        return await super().run_command(cmd, input=input, env=known if env is None else env)

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
        return f"Job {self.job_id} waits in the queue: {REASONS.get(reason, reason or 'Slurm is asked')} …"


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
