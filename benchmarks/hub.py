"""Measure the hub at nine o'clock: a class that logs in and starts its servers within a minute, on this one machine.

    python -m benchmarks.hub                            # as root: twenty learners, three minutes
    python -m benchmarks.hub --learners 4 --minute 12   # fewer, in so many seconds

login       seconds from opening the login form to the page where a learner chooses a server.
ready       seconds from the click on Start until the hub says that the server is ready: the queue, the copy of the course, Lab.
first page  seconds from the same click until JupyterLab's page and the list of files are there, without a browser's own work.
memory      MB (PSS: a page that n processes share counts 1/n in each) of the hub with its idle-culler, of the proxy, of a server.

Every learner is a new account and a thread that talks HTTP as a browser does. The peer comes first, on the same hub while nothing
else happens: one learner alone, the median of three, one after the other. Hub, Slurm, accounts and files are removed at the end.
"""

import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import requests

from benchmarks import table
from benchmarks.table import Row
from course_lib.config import Parser, UserError, run_main
from course_lib.ports import claim_ports

ROOT = Path(__file__).resolve().parents[1]
PEER, ALONE = "one learner alone", 3
PROFILE = '[[profile]]\nname = "load"\ntitle = "One core"\noptions = "--nodes=1 --ntasks=1 --mem=500"\n'
PATIENCE = 300  # seconds until an answer goes on


def write_site(file: Path, url: str, learners: list[str]) -> None:
    """hub/site.toml with these learners, and a profile of which there is one for each."""
    values = {"url": json.dumps(url), "teachers": "[]", "learners": json.dumps(learners), "hours": "[1]"}
    text = (ROOT / "hub" / "site.toml").read_text().partition("[[profile]]")[0] + PROFILE
    for name, value in values.items():
        text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
    file.write_text(text)


class Learner(threading.Thread):
    """A browser without a screen: it logs in, starts a server and opens it. `seconds` has what was measured."""

    def __init__(self, url: str, name: str, password: str):
        super().__init__(daemon=True)
        self.url, self.name, self.password = url, name, password
        self.session, self.seconds, self.failure = requests.Session(), {}, ""

    def ask(self, path: str, method: str = "GET", **options) -> requests.Response:
        answer = self.session.request(method, self.url + path, timeout=PATIENCE, **options)
        if not answer.ok:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.reason}")
        return answer

    def xsrf(self) -> dict[str, str]:
        return {"_xsrf": self.session.cookies.get("_xsrf", path="/hub/")}

    def run(self) -> None:
        try:
            self.log_in_and_start()
        except (requests.RequestException, RuntimeError) as error:
            self.failure = f"{self.name}: {error}"

    def log_in_and_start(self) -> None:
        start = time.perf_counter()
        self.ask("/hub/login")
        self.ask("/hub/login", "POST", data={"username": self.name, "password": self.password} | self.xsrf())
        self.ask("/hub/spawn")
        self.seconds["login"] = time.perf_counter() - start
        start = time.perf_counter()
        self.ask("/hub/spawn", "POST", params=self.xsrf(), data={"profile": "load", "hours": "1"})
        self.wait()
        self.seconds["ready"] = time.perf_counter() - start
        page = self.ask(f"/user/{self.name}/lab")
        files = self.ask(f"/user/{self.name}/api/contents").json()
        if "jupyter-config-data" not in page.text or "notebooks" not in [one["name"] for one in files["content"]]:
            raise RuntimeError(f"{page.url} is not JupyterLab with the course")
        self.seconds["first page"] = time.perf_counter() - start

    def wait(self) -> None:
        """Read what the hub tells while the job waits and starts."""
        with self.ask(f"/hub/api/users/{self.name}/server/progress", params=self.xsrf(), stream=True) as events:
            for line in filter(None, events.iter_lines(decode_unicode=True)):
                event = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if event.get("failed"):
                    raise RuntimeError(event["message"])
                if event.get("ready"):
                    return
        raise RuntimeError("the hub stopped telling before the server was ready")

    def stop(self) -> None:
        self.ask(f"/hub/api/users/{self.name}/server", "DELETE", params=self.xsrf())
        while processes_of([self.name]):
            time.sleep(0.2)


def processes_of(names: list[str]) -> list[psutil.Process]:
    found = psutil.process_iter(["username", "status"])
    return [one for one in found if one.info["username"] in names and one.info["status"] != psutil.STATUS_ZOMBIE]


def megabytes(processes: list[psutil.Process]) -> float:
    return sum(one.memory_full_info().pss for one in processes) / 1e6


def memory(folder: Path, learners: list[str]) -> dict[str, float]:
    hub, proxy = (psutil.Process(int((folder / f"{name}.pid").read_text())) for name in ("hub", "proxy"))
    culler = [one for one in hub.children(recursive=True) if one != proxy]
    servers = [megabytes(processes_of([name])) for name in learners]
    found = {"hub": megabytes([hub, *culler]), "proxy": megabytes([proxy])}
    return found | {"a server, median": statistics.median(servers), "all": sum(found.values()) + sum(servers)}


def measure(folder: Path, url: str, names: list[str], *, seconds: float) -> Iterator[Row]:
    """Each alone, then all within these seconds."""
    password = (folder / "password").read_text().strip()
    learners = [Learner(url, name, password) for name in names]
    alone, members, used = learners[:ALONE], learners[ALONE:], []
    for learner in alone:
        learner.run()
        if learner.failure:
            raise RuntimeError(f"{(folder / 'hub.log').read_text()}\nalready {PEER} failed: {learner.failure}")
        used.append(memory(folder, [learner.name]))
        learner.stop()
    start = time.perf_counter()
    for number, learner in enumerate(members):
        time.sleep(max(0, start + number * seconds / len(members) - time.perf_counter()))
        learner.start()
    for learner in members:
        learner.join()
        if learner.failure:
            print(learner.failure, file=sys.stderr, flush=True)
    served = [learner for learner in members if "first page" in learner.seconds]
    yield Row("learners with a server", len(served), "learners who came", len(members), (">=", 1.0))
    if not served:
        return
    for what in alone[0].seconds:
        lone, loaded = ([one.seconds[what] for one in group] for group in (alone, served))
        yield Row(f"s, {what}, median", statistics.median(loaded), PEER, statistics.median(lone))
        yield Row(f"s, {what}, slowest", max(loaded), PEER, statistics.median(lone))
    for what, value in memory(folder, [learner.name for learner in served]).items():
        yield Row(f"MB, {what}", value, PEER, statistics.median(one[what] for one in used))


def clean_up(folder: Path, names: list[str]) -> None:
    """Nothing stays, whatever was running: down.sh first, then what it didn't know of. Another ^C is too late."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    subprocess.call([ROOT / "hub" / "down.sh", folder], stdout=subprocess.DEVNULL)
    state = ("COURSE_HUB_STATE", str(folder))
    started = [one for one in psutil.process_iter(["environ"]) if state in (one.info["environ"] or {}).items()]
    for process in [*started, *processes_of(names)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for path in Path("/tmp").glob("course-server-*"):  # of jobs that were killed; by owner, so before the accounts go
        if path.stat().st_uid in {user.pw_uid for user in pwd.getpwall() if user.pw_name in names}:
            shutil.rmtree(path)
    for name in accounts(names):
        done = subprocess.run(["userdel", "--remove", name], check=False, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, end="", file=sys.stderr)
    shutil.rmtree(folder)


def accounts(names: list[str]) -> list[str]:
    return sorted({user.pw_name for user in pwd.getpwall()} & {*names})


def main() -> None:
    parser = Parser(prog="python -m benchmarks.hub", description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=20, help="how many come")
    parser.add_argument("--minute", type=float, default=60, help="seconds within which they come")
    options = parser.parse_args()
    names = [f"load{number:02d}" for number in range(1, ALONE + options.learners + 1)]
    if os.geteuid() != 0:
        raise UserError("learners are accounts of this machine, and only root can make them; run it as root")
    for taken in accounts(names):
        raise UserError(f"{taken} is an account of this machine already; if an earlier run left it: userdel -r {taken}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="hub-")).resolve()
    try:
        with claim_ports() as claim:
            url = f"http://127.0.0.1:{claim.getsockname()[1]}"
        write_site(folder / "site.toml", url, names)
        settings = {"COURSE_HUB_SITE": str(folder / "site.toml"), "COURSE_CPUS": str(options.learners + ALONE)}
        up = [ROOT / "hub" / "up.sh", folder]
        if subprocess.call(up, env=os.environ | settings, stdout=subprocess.DEVNULL) != 0:
            raise UserError("the hub did not come up; see above")
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
        print(machine | vars(options))
        print(table.LINE.format("what", "ours", "theirs", "peer", "ratio", "goal", ""), flush=True)
        for row in measure(folder, url, names, seconds=options.minute):
            table.show(row)
    finally:
        clean_up(folder, names)


if __name__ == "__main__":
    run_main(main)
