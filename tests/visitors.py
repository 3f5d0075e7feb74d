"""A real JupyterHub on a real Slurm, and people who visit it in a real browser. The names of its accounts begin with ddl-."""

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import psutil
import pytest
from helpers import ROOT, ask, wait_until
from playwright.sync_api import Error, sync_playwright

from course_lib.ports import claim_ports, next_port

HUB = ROOT / "hub"
SHOTS = ROOT / "runs" / "screenshots"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
MORE_FLAGS = ("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")
# The pictures in front that are drawn, and on to the next ones; after the last from the top again.
LOOK = """() => {
    const pane = document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer')
    const images = [...pane.querySelectorAll('.jp-RenderedImage img')].filter(one => one.naturalWidth > 100)
    const end = pane.scrollTop + pane.clientHeight >= pane.scrollHeight - 1
    pane.scrollTop = end ? 0 : pane.scrollTop + pane.clientHeight / 2
    return images.map(one => one.src)
}"""


@contextmanager
def open_browser() -> Iterator:
    """Chromium without a window."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not path:
        pytest.skip("there is no browser: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS, *MORE_FLAGS])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Hub:
    folder: Path
    url: str
    env: dict
    shots: set = field(default_factory=set)

    @property
    def password(self) -> str:
        return (self.folder / "password").read_text().strip()

    def script(self, name: str) -> str:
        """hub/up.sh or down.sh."""
        command = [HUB / name, self.folder]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pid(self, name: str) -> int:
        """0 while there is none: a program that starts again writes its number anew."""
        with suppress(FileNotFoundError, ValueError):
            return int((self.folder / f"{name}.pid").read_text())
        return 0

    def end(self) -> None:
        """Of the hub's own process; proxy, servers and Slurm go on."""
        os.kill(self.pid("hub"), signal.SIGTERM)
        wait_until(lambda: not psutil.pid_exists(self.pid("hub")), every=0.2)  # 0, without its file, is nobody's

    def ask(self, *command: object) -> str:
        return ask(self.folder / "slurm", *command)

    def queue(self, name: str) -> list[str]:
        """The jobs of a learner, as "number name node"."""
        return self.ask("squeue", "-h", f"--user={name}", "-o", "%i %j %N").splitlines()

    def power_off(self, node: str) -> subprocess.Popen:
        """Kill all that runs on a node; what is returned keeps the place: its host name and its view of the files."""
        slurmd = int((self.folder / "slurm" / "run" / f"slurmd.{node}.pid").read_text())
        there = machine_of(slurmd)
        place = subprocess.Popen(["nsenter", f"--target={slurmd}", "--uts", "--mount", "sleep", "900"])
        wait_until(lambda: machine_of(place.pid) == there, every=0.1)
        for pid in psutil.pids():
            if pid != place.pid and machine_of(pid) == there:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return place

    def power_on(self, node: str, place: subprocess.Popen) -> None:
        command = ["nsenter", f"--target={place.pid}", "--uts", "--mount", "slurmd", "-N", node]
        settings = {"SLURM_CONF": f"{self.folder}/slurm/slurm.conf", "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        subprocess.run(command, env=os.environ | settings, check=True, timeout=60)
        place.kill()
        place.wait()

    def log(self) -> str:
        return (self.folder / "hub.log").read_text()


def machine_of(pid: int) -> str:
    """Which host name a process has, its own or that of others; "" if it has ended."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/uts")
    return ""


def command_of(process: psutil.Process) -> list[str]:
    """Nothing, if it has ended by now."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def home(name: str) -> Path:
    return Path(f"~{name}").expanduser()


def run_as(name: str, *command: object, **options) -> subprocess.CompletedProcess:
    """A program of a learner's own, in the place that everybody may enter."""
    words = ["runuser", "-u", name, "--", *map(str, command)]
    return subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=120, check=False, **options)


@contextmanager
def start_hub(
    learners: list[str], teachers: list[str] = (), *, small: dict[str, int] | None = None, tls: Path | None = None
):
    """With accounts that end with it; the homes of some have so many megabytes. With TLS the passwords are the accounts' own."""
    folder, claim, small = Path(tempfile.mkdtemp(prefix="hub-")), claim_ports(), small or {}
    hub = Hub(
        folder,
        f"http{'s' * bool(tls)}://127.0.0.1:{next_port(claim)}",
        os.environ | {"COURSE_HUB_SITE": f"{folder}/site.toml"},
    )
    values = {"url": hub.url, "teachers": list(teachers), "learners": learners}
    if tls:
        values |= {"tls_key": f"{tls}/key.pem", "tls_cert": f"{tls}/cert.pem", "authenticator": "pam"}
        hub.env["CURL_CA_BUNDLE"] = values["tls_cert"]
    text = (HUB / "site.toml").read_text()
    for name, value in values.items():
        text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {json.dumps(value)}", text)
    (folder / "site.toml").write_text(text)
    try:
        for name, size in small.items():
            subprocess.run(
                ["userdel", "--force", "--remove", name], capture_output=True, check=False
            )  # of a run cut short
            subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", name], check=True)
            owner = f"size={size}m,mode=700,uid={pwd.getpwnam(name).pw_uid},gid={pwd.getpwnam(name).pw_gid}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", owner, "tmpfs", home(name)], check=True)
        hub.script("up.sh")
        yield hub
    finally:
        SHOTS.mkdir(parents=True, exist_ok=True)
        if (folder / "hub.log").exists():
            shutil.copy(folder / "hub.log", SHOTS)
        try:
            hub.script("down.sh")
        finally:
            claim.close()
            for name in small:
                subprocess.run(["umount", "--lazy", home(name)], check=False)
            for name in [*learners, *teachers]:
                subprocess.run(["pkill", "-KILL", "-u", name], check=False)
                subprocess.run(["userdel", "--force", "--remove", name], capture_output=True, check=False)
            shutil.rmtree(folder, ignore_errors=True)


class Visitor:
    """Somebody with a browser of their own: cookies are not shared."""

    def __init__(self, browser, hub: Hub, name: str):
        self.hub, self.name = hub, name
        self.context = browser.new_context(viewport={"width": 1400, "height": 900}, ignore_https_errors=True)
        self.context.set_default_timeout(120_000)
        self.addresses: list[str] = []  # of all that the browser asks for
        self.context.on("request", lambda request: self.addresses.append(request.url))
        self.context.on("page", lambda page: page.on("websocket", lambda socket: self.addresses.append(socket.url)))
        self.page = self.context.new_page()
        self.server = f"{hub.url}/user/{name}"

    def shot(self, title: str) -> None:
        """An artefact of the tests, for eyes. No two have the same name."""
        title = re.sub(r"[^\w-]+", "-", title)
        assert title not in self.hub.shots, title
        self.hub.shots.add(title)
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{title}.png")

    def log_in(self, password: str | None = None) -> None:
        self.page.goto(self.hub.url)
        self.page.fill("#username_input", self.name)
        self.page.fill("#password_input", password or self.hub.password)
        with self.page.expect_navigation():
            self.page.click("#login_submit")

    def choose(self, profile: str = "small", hours: int = 1) -> None:
        self.page.goto(f"{self.hub.url}/hub/spawn")
        self.page.check(f"[name=profile][value={profile}]")
        self.page.check(f"[name=hours][value='{hours}']")

    def ask_for_a_server(self, profile: str = "small", hours: int = 1) -> None:
        self.choose(profile, hours)
        self.page.click("#spawn_form [type=submit]")

    def wait_for_lab(self) -> list[str]:
        """Until the lesson is open; what was told on the way."""
        told, deadline = [], time.monotonic() + 180
        while "/lab" not in self.page.url:
            assert time.monotonic() < deadline, f"no Lab: {told}, {self.page.inner_text('body')}"
            with suppress(Error):  # on its way from one page to the next
                message = self.page.evaluate("document.querySelector('#progress-message')?.innerText || ''")
                told += [message] if message and message not in told else []
            self.page.wait_for_timeout(100)
        self.page.wait_for_selector(".jp-NotebookPanel:visible .jp-RenderedMarkdown:visible")
        return told

    def wait_for_notebook(self) -> None:
        """Until the one in front is drawn and its kernel waits for work; Lab may have opened those of the last time as well."""
        self.page.wait_for_selector(".jp-NotebookPanel:visible .jp-Cell:visible")
        self.page.wait_for_selector(
            ".jp-NotebookPanel:visible .jp-Notebook-ExecutionIndicator[data-status=idle]:visible"
        )
        self.page.wait_for_selector("#jp-main-statusbar :text('| Idle')")

    def arrive(self, profile: str = "small") -> list[str]:
        """From the login page to Lab."""
        self.log_in()
        self.ask_for_a_server(profile)
        return self.wait_for_lab()

    def open(self, path: str) -> None:
        """A notebook of the learner's course in Lab, alone."""
        self.page.goto(f"{self.server}/lab/tree/{path}?reset")
        self.page.wait_for_selector(f".lm-DockPanel-tabBar .lm-TabBar-tabLabel:text-is('{Path(path).name}')")
        self.wait_for_notebook()

    def menu(self, *words: str) -> None:
        """File, Save: and so on."""
        self.page.click(f".lm-MenuBar-itemLabel:text-is('{words[0]}')")
        for word in words[1:]:
            self.page.click(f".lm-Menu-itemLabel:text-is('{word}')")

    def run_all(self, path: str, *, seconds: float = 300) -> dict:
        """Run All Cells, to the last one; the notebook as it was saved."""
        self.open(path)
        self.menu("Run", "Run All Cells")
        file = home(self.name) / "course" / path
        return watch(self.page, file, seconds)

    def find_cell(self, text: str):
        """Scroll until a cell is there that has this text: Lab draws only what one sees."""
        self.page.keyboard.press("Escape")
        self.page.click(".jp-NotebookPanel .jp-Cell >> nth=0")
        cell = self.page.locator(f".jp-Cell:has-text('{text}')")
        self.page.hover(".jp-NotebookPanel .jp-WindowedPanel-outer")
        for _ in range(300):
            if cell.count():
                cell.first.scroll_into_view_if_needed()
                self.page.wait_for_timeout(1000)
                return cell.first
            self.page.mouse.wheel(0, 600)
            self.page.wait_for_timeout(50)
        raise AssertionError(f"no cell has {text}")

    def see_figures(self, count: int) -> None:
        """Scroll through the notebook until so many pictures were drawn."""
        seen, deadline = set(), time.monotonic() + 120
        while len(seen) < count:
            assert time.monotonic() < deadline, f"{len(seen)} of {count} figures are drawn"
            seen |= set(self.page.evaluate(LOOK))
            self.page.wait_for_timeout(200)

    def open_assignments(self, name: str) -> None:
        """nbgrader's list, and one of it in detail."""
        self.menu("Nbgrader", "Assignment List")
        self.page.click(f"#fetched_assignments_list a:text-is('{name}') >> nth=0")
        self.page.wait_for_timeout(600)

    def answer(self) -> str:
        """What a dialog says, which is then closed."""
        self.page.wait_for_selector(".jp-Dialog")
        text = self.page.inner_text(".jp-Dialog")
        self.page.click(".jp-Dialog button >> nth=-1")
        self.page.wait_for_selector(".jp-Dialog", state="detached")
        return text

    def grade(self, row: str, step: str, *, fresh: bool = True) -> str:
        """A click in nbgrader's formgrader; what it says."""
        if fresh:
            self.page.goto(f"{self.server}/formgrader")
        self.page.click(f"tr:has-text('{row}') .{step} a")
        self.page.wait_for_selector(".modal.in >> text=/Success|Error/")
        text = self.page.inner_text(".modal.in")
        assert "Success" in text, text
        self.page.click(".modal.in button >> nth=-1")
        self.page.wait_for_selector(".modal-backdrop", state="detached")
        return text

    def restart(self, why: str) -> None:
        """What Lab offers when the server is gone: the hub's page in another tab. What it says before that is clicked away."""
        deadline = time.monotonic() + 120
        while not self.page.locator(".jp-Dialog button:has-text('Restart')").count():
            assert time.monotonic() < deadline, self.page.inner_text("body")
            if self.page.locator(".jp-Dialog").count():
                self.answer()
            self.page.wait_for_timeout(200)
        self.shot(f"{why}-1-lost")
        with self.context.expect_page() as tab:
            self.page.click(".jp-Dialog button:has-text('Restart')")
        self.page = tab.value
        self.page.wait_for_load_state()
        self.shot(f"{why}-2-hub")
        while not self.stopped():  # the hub looks every 15 seconds
            self.page.wait_for_timeout(1000)

    def leave(self) -> None:
        """Stop My Server, if there is one, as a person does on the hub's own page."""
        if not self.stopped():
            self.page.click("#stop")
            self.page.wait_for_selector("#start:has-text('Start My Server')")

    def stopped(self) -> bool:
        """The hub knows that this person has no server."""
        self.page.goto(f"{self.hub.url}/hub/home")
        return "Start My Server" in self.page.inner_text("#start")

    def reaches(self, url: str) -> bool:
        with suppress(Error):
            return self.get(url).ok
        return False

    def get(self, url: str, **options):
        """With this person's cookies, and without a page."""
        return self.context.request.get(url, **options)


def watch(page, file: Path, seconds: float) -> dict:
    """Save and look, until every cell has run or one has failed."""
    deadline = time.monotonic() + seconds
    while True:
        page.wait_for_timeout(1500)
        page.keyboard.press("Control+s")
        page.wait_for_timeout(500)
        notebook = json.loads(file.read_text())
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code" and "".join(cell["source"]).strip()]
        waiting = [cell for cell in cells if cell["execution_count"] is None]
        if not waiting or errors(notebook):
            return notebook
        assert time.monotonic() < deadline, f"{len(waiting)} cells of {file.name} have not run: {waiting[0]['source']}"


def outputs(notebook: dict) -> Iterator[dict]:
    for cell in notebook["cells"]:
        yield from cell.get("outputs", [])


def errors(notebook: dict) -> list[str]:
    return [f"{one['ename']}: {one['evalue']}" for one in outputs(notebook) if one["output_type"] == "error"]


def printed(notebook: dict) -> str:
    """All text that the cells have put out."""
    parts = []
    for one in outputs(notebook):
        parts += [one["text"]] if "text" in one else [one.get("data", {}).get("text/plain", "")]
    return "\n".join("".join(part) for part in parts)


def figures(notebook: dict) -> int:
    return sum("image/png" in one.get("data", {}) for one in outputs(notebook))


def write_notebook(name: str, path: str, *cells: str) -> None:
    """A notebook in somebody's course."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    file = home(name) / "course" / path
    file.write_text(nbformat.writes(notebook))
    file.chmod(0o600)
    shutil.chown(file, name, name)
