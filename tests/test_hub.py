"""The learner's front door, in a real browser: a real JupyterHub whose servers are jobs of a real Slurm."""

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import ipyparallel
import psutil
import pytest
import requests
from helpers import BIN, ROOT, wait_until
from visitors import (
    Hub,
    Visitor,
    command_of,
    errors,
    figures,
    home,
    open_browser,
    printed,
    run_as,
    start_hub,
    watch,
    write_notebook,
)

from course_lib.ports import claim_ports, next_port
from lessons.run import smoke_parameters

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
LEARNERS, TEACHER = ["ddl-ada", "ddl-bob", "ddl-dan"], "ddl-tea"
LESSON = "notebooks/00_start.ipynb"
# What a learner types who wants ranks on two nodes and a job in the queue.
ON_NODES = (
    'from course_lib import ranks\nteam = ranks.start(4, slurm="--nodes=2 --ntasks-per-node=2 --mem-per-cpu=300")',
    "%%px\nimport socket, torch\nfrom course_lib.config import Config\nfrom course_lib.world import start\n"
    'world = start(Config(launcher="mpi", device="cpu", timeout=60))\ntotal = torch.tensor([2.0 ** world.rank])\n'
    "torch.distributed.all_reduce(total)\nprint(socket.gethostname(), int(total))",
    'import ipyparallel\nknown = (await team.cluster.controller.get_connection_info())["client"]\n'
    'with ipyparallel.Client(dict(known), timeout=60) as client:\n    print(known["interface"], client.ids)\n'
    'try:\n    ipyparallel.Client(known | {"key": "guessed"}, timeout=3)\nexcept TimeoutError:\n    print("not without the key")',
    "team.stop()",
)
ON_ITS_NODES = (
    "from course_lib import ranks\nteam = ranks.start(4)",
    "%%px\nimport socket\nfrom mpi4py import MPI\n"
    "print(socket.gethostname(), MPI.COMM_WORLD.allreduce(2**MPI.COMM_WORLD.rank))",
    "team.stop()",
)
ON_THIS_NODE = (
    "import course_lib\nprint(course_lib.__file__)\nfrom course_lib import ranks\nteam = ranks.start(2)",
    "!python -m course_lib.train --data ../data/smoke --train-years 1980 --valid-years 1984 --max-steps 1 --width 4 "
    "--runs ../runs --name private",
    'import lightning\nlightning.Fabric(accelerator="cpu", devices=1)\n'
    'lightning.Trainer(accelerator="cpu", devices=1, logger=False)',  # neither takes the job for its own
)
CURVES = (
    'from torch.utils.tensorboard import SummaryWriter\nwith SummaryWriter("../runs/curves") as writer:\n'
    '    for step in range(9):\n        writer.add_scalar("a_curve", step, step)',
    'from course_lib import board\nboard.show("../runs/curves")',
)
IN_THE_QUEUE = (
    "from course_lib import jobs\n"
    'asked = dict(data="../data/smoke", train_years="1980-1983", valid_years="1984", width=4, max_steps=20, epochs=1)\n'
    'job = jobs.submit("04_ddp", nodes=2, cpus_per_task=1, mem_per_cpu=500, **asked)\njob',
    "result = job.result()\nprint(job.status().state, result)",
    "jobs.table()",
)
PAIRED = "# %% [markdown]\n# a title\n# %%\n6 * 7\n"
RANKS_PANEL = ".jp-SideBar [data-id=ipp-cluster-launcher]"  # ipyparallel's


@pytest.fixture(scope="module")
def hub():
    if os.geteuid() != 0:
        pytest.skip("a hub for several learners needs root: accounts, and jobs in their names")
    if not shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin"):
        pytest.skip("Slurm is not installed: apt-get install slurm-wlm slurm-client munge")
    if not (BIN / "configurable-http-proxy").exists():
        pytest.skip("the hub's proxy is not installed: make .venv/bin/configurable-http-proxy")
    smoke_parameters("04_ddp")  # makes its data, which every learner sees
    with start_hub(LEARNERS, [TEACHER], small={"ddl-dan": 40}) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with open_browser() as chromium:
        yield chromium


@pytest.fixture
def visitor(browser, hub, request):
    """Somebody new at the door. Whatever their browsers ask for, no secret is in its address."""
    people, test = [], request.node.name.removeprefix("test_")

    def come(name: str) -> Visitor:
        people.append(Visitor(browser, hub, name))
        return people[-1]

    yield come
    for number, one in enumerate(people, 1):
        one.shot(f"last-{test}-{number}-{one.name}")
        one.context.close()
    secrets = re.compile(f"[?&#]token=|{hub.password}|{(hub.folder / 'proxy_token').read_text()}")
    assert [url for one in people for url in one.addresses if secrets.search(url)] == []


@pytest.fixture
def inside(visitor, hub):
    """Somebody whose server runs, and is started if need be."""

    def come(name: str, *, lab: bool = True) -> Visitor:
        one = visitor(name)
        one.log_in()
        if one.stopped():
            one.ask_for_a_server()
            one.wait_for_lab()
        elif lab:
            one.open(LESSON)
        return one

    return come


def server_of(name: str) -> psutil.Process:
    """The process of a learner's server."""
    found = [one for one in psutil.process_iter(["username", "cmdline"]) if one.info["username"] == name]
    return next(one for one in found if any("jupyterhub-singleuser" in word for word in one.info["cmdline"] or ()))


def token_of(name: str) -> str:
    return server_of(name).environ()["JUPYTERHUB_API_TOKEN"]


# ---- the door ---------------------------------------------------------------------------------------------------------------


def test_without_a_login_there_is_only_the_login_page(visitor, hub):
    nobody = visitor("ddl-ada")
    for path in ("/", "/hub/home", "/hub/spawn", "/user/ddl-ada/lab", "/user/ddl-ada/api/contents"):
        answer = nobody.get(f"{hub.url}{path}")
        assert "/hub/login" in answer.url or answer.status == 403, path
    assert nobody.get(f"{hub.url}/hub/api/users").status == 403
    assert nobody.context.request.get(f"{hub.url}/hub/metrics").status in (403, 404)


@pytest.mark.parametrize("name, password", [("ddl-ada", "guessed"), ("ddl-ada", " "), ("root", None), ("nobody", None)])
def test_a_wrong_password_or_a_strangers_name_is_refused(name, password, visitor):
    guest = visitor(name)
    guest.log_in(password)
    guest.page.wait_for_load_state()
    assert "/hub/login" in guest.page.url
    assert "Invalid username or password" in guest.page.inner_text("body")


# ---- a learner's morning ------------------------------------------------------------------------------------------------------


def test_from_the_login_page_to_the_last_cell_of_lesson_00(visitor, hub):
    ada = visitor("ddl-ada")
    ada.page.goto(hub.url)
    ada.shot("01-login")
    ada.log_in()
    ada.page.wait_for_selector("#spawn_form")
    ada.shot("02-choice")
    ada.ask_for_a_server()
    told = ada.wait_for_lab()
    assert re.search(r"Job \d+ (waits in the queue|runs on node\d)", " ".join(told)), told  # it may start at once
    assert ada.page.url == f"{ada.server}/lab/tree/{LESSON}"
    ada.wait_for_notebook()
    ada.shot("03-lab")
    specs = ada.get(f"{ada.server}/api/kernelspecs").json()
    assert list(specs["kernelspecs"]) == ["python3"]
    names = {one["name"] for one in ada.get(f"{ada.server}/api/contents").json()["content"]}
    assert {"notebooks", "exercises", "course_lib", "slurm"} <= names and not {"solutions", "tests"} & names
    assert ada.page.locator(".jp-NotebookPanel-toolbar :text-is('Validate')").is_visible()
    assert_extensions(ada)
    ada.page.click(".lm-MenuBar-itemLabel:text-is('Nbgrader')")
    items = ada.page.locator(".lm-Menu-itemLabel").all_inner_texts()
    assert list(filter(None, items)) == ["Assignment List"]  # and not a teacher's
    ada.page.keyboard.press("Escape")
    notebook = ada.run_all(LESSON)
    assert errors(notebook) == []
    ada.shot("04-lesson-00")
    assert_no_news(ada)


def assert_extensions(ada: Visitor) -> None:
    """nbgrader's, and jupytext's that reads a program as a notebook; of ipyparallel no panel: hub/README.md says why."""
    about = json.loads(ada.page.locator("#jupyter-config-data").text_content())
    there = {one["name"] for one in about["federated_extensions"]} - set(about["disabledExtensions"])
    assert {"@jupyter/nbgrader", "jupyterlab-jupytext"} <= there and "ipyparallel-labextension" not in there
    assert ada.page.locator(RANKS_PANEL).count() == 0
    program = home("ddl-ada") / "course" / "paired.py"
    program.write_text(PAIRED)
    shutil.chown(program, "ddl-ada")
    opened = ada.get(f"{ada.server}/api/contents/paired.py?type=notebook").json()
    program.unlink()
    assert [cell["source"] for cell in opened["content"]["cells"]] == ["a title", "6 * 7"]


def assert_no_news(ada: Visitor) -> None:
    """Nobody is asked about news, and nothing is fetched from outside."""
    setting = ada.get(f"{ada.server}/lab/api/settings/@jupyterlab/apputils-extension:notification").json()
    assert setting["schema"]["properties"]["fetchNews"]["default"] == "false" and not setting["settings"]
    asked = " ".join(ada.addresses)
    assert "/lab/api/settings" in asked and "/lab/api/news" not in asked and "/lab/api/update" not in asked
    assert ada.page.locator(".Toastify__toast").count() == 0


def test_tensorboard_is_drawn_inside_of_a_notebook(inside, visitor, hub):
    """Through the hub's proxy and the learner's server, and for that learner only."""
    ada = inside("ddl-ada")
    write_notebook("ddl-ada", "notebooks/board.ipynb", *CURVES)
    assert errors(ada.run_all("notebooks/board.ipynb")) == []
    page = ada.page.frame_locator(".jp-OutputArea iframe")
    page.locator("text=/a_curve/").first.wait_for()
    ada.shot("05-tensorboard")
    address = ada.page.locator(".jp-OutputArea iframe").get_attribute("src")
    assert ada.get(f"{hub.url}{address}").ok
    bob = visitor("ddl-bob")
    bob.log_in()
    assert bob.get(f"{hub.url}{address}").status == 403


def test_lesson_04_on_ranks_inside_the_job(inside):
    ada = inside("ddl-ada")
    lesson = home("ddl-ada") / "course" / "notebooks" / "04_ddp.ipynb"
    notebook = json.loads(lesson.read_text())
    cell = next(cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", []))
    cell["source"] = "".join(cell["source"]) + "".join(
        f"\n{name} = {value!r}" for name, value in smoke_parameters("04_ddp").items()
    )
    lesson.write_text(json.dumps(notebook))  # as a learner who is in a hurry would change it
    done = ada.run_all("notebooks/04_ddp.ipynb", seconds=500)
    assert errors(done) == []
    assert figures(done) >= 3
    ada.see_figures(figures(done))
    picture = ada.find_cell("plots.timeline(recorded)").locator("img").first
    picture.scroll_into_view_if_needed()
    assert picture.evaluate("image => image.naturalWidth") > 300
    ada.shot("06-timeline")


def test_ranks_as_a_second_job_on_two_nodes_and_a_companion_job(inside, hub):
    ada = inside("ddl-ada")
    write_notebook("ddl-ada", "notebooks/mine.ipynb", *ON_NODES, *IN_THE_QUEUE)
    done = ada.run_all("notebooks/mine.ipynb")
    assert errors(done) == []
    said = printed(done)
    assert said.count("node1 15") == 2 and said.count("node2 15") == 2, said  # 1 + 2 + 4 + 8, on both nodes
    assert "tcp://* [0, 1, 2, 3]\nnot without the key" in said, said  # whoever reaches the ranks' ports on the nodes
    assert "COMPLETED" in said, said
    ada.page.wait_for_selector("text=/job \\d+ .04_ddp.: completed on node.1-2. after/")  # in the page, not in the file
    ada.shot("07-jobs")
    assert [job.split()[1] for job in hub.queue("ddl-ada")] == ["jupyter"]  # the ranks have ended


def test_two_learners_at_once_have_servers_and_ranks_of_their_own(visitor, hub):
    people = {visitor("ddl-ada"): 1, visitor("ddl-bob"): 2}  # hours
    for one in people:
        one.log_in()
        one.leave()
    one.choose("ranks", 2)
    one.shot("08-choice-of-ranks")
    for one, hours in people.items():
        one.ask_for_a_server("ranks", hours)
    for one in people:
        one.wait_for_lab()
    for one, hours in people.items():
        asked = hub.ask("squeue", "-h", f"--user={one.name}", "--name=jupyter", "-o", "%D %C %l")
        assert asked.split() == ["2", "4", f"{hours}:00:00"]  # nodes and cores of that profile
        assert one.get(f"{one.server}/api/me").json()["identity"]["username"] == one.name
        write_notebook(one.name, "notebooks/team.ipynb", *ON_ITS_NODES)
        one.open("notebooks/team.ipynb")
    for one in people:
        one.menu("Run", "Run All Cells")
    for one in people:
        done = watch(one.page, home(one.name) / "course" / "notebooks" / "team.ipynb", 300)
        assert errors(done) == []
        assert printed(done).count("node1 15") == printed(done).count("node2 15") == 2, printed(done)
        one.shot(f"09-two-learners-{one.name}")


# ---- an exercise, from its release to its feedback --------------------------------------------------------------------------


def test_an_exercise_is_released_done_validated_submitted_graded_and_answered(inside, hub):
    tea, bob = inside(TEACHER), inside("ddl-bob")
    tea.page.wait_for_selector(RANKS_PANEL)
    for step in ("assign", "release"):
        tea.grade("ex00_start", step)
    exercise = home("ddl-bob") / "course/exercises/ex00_start/ex00_start.ipynb"
    assert "NotImplementedError" in exercise.read_text()
    bob.open_assignments("ex00_start")
    bob.page.click("button:text-is('Validate')")
    assert "failed" in bob.answer()  # nothing is done yet
    exercise.write_text((ROOT / "solutions/ex00_start/ex00_start.ipynb").read_text())  # hours later
    bob.page.click("button:text-is('Validate')")
    assert "Success! Your notebook passes all the tests." in bob.answer()
    bob.shot("10-assignment")
    bob.page.click("button:text-is('Submit')")
    bob.page.wait_for_selector("#submitted_assignments_list button:text-is('Fetch Feedback')")
    inbound = hub.folder / "exchange" / "ddl" / "inbound"
    assert run_as(TEACHER, "ls", inbound).stdout.startswith("ddl-bob+ex00_start+")
    for look in (f"ls {inbound}", f"cat {inbound}/*/*"):
        refused = run_as("ddl-ada", "sh", "-c", look)
        assert refused.returncode != 0 and refused.stdout == ""
    assert "collected" in tea.grade("ex00_start", "collect")
    tea.page.click("tr:has-text('ex00_start') .num-submissions a")
    tea.grade("ddl-bob", "autograde", fresh=False)
    tea.page.wait_for_selector("tr:has-text('ddl-bob') .status:has-text('graded')")
    assert "7 / 7" in tea.page.inner_text("tr:has-text('ddl-bob')")
    tea.shot("11-graded")
    for step in ("generate-feedback", "release-feedback"):
        tea.grade("ex00_start", step)
    bob.page.click("#refresh_assignments_list")
    bob.page.wait_for_selector("text=feedback available to fetch")
    bob.page.click("button:text-is('Fetch Feedback')")
    bob.page.wait_for_selector("text=view feedback")
    pages = list((home("ddl-bob") / "course").glob("exercises/ex00_start/feedback/*/*.html"))
    assert len(pages) == 1 and "Score: 7.0 / 7.0" in pages[0].read_text()
    bob.shot("12-feedback")


def test_what_an_update_brings_never_overwrites_a_learners_work(inside, hub):
    """The lesson that ada has changed stays hers, and the new one is beside it; another is replaced."""
    ada = inside("ddl-ada")
    mine = home("ddl-ada") / "course" / "notebooks" / "04_ddp.ipynb"
    mine.write_text(mine.read_text() + "\n\n")
    shadow = home("ddl-ada") / "course" / "json.py"
    shadow.write_text("raise SystemExit")  # of a name that Python has too
    before = mine.read_bytes()
    for name in ("04_ddp", "03_data_parallel"):
        path = hub.folder / "published" / "learners" / "notebooks" / f"{name}.ipynb"
        path.write_text(path.read_text() + "\n")
    ada.leave()
    inside("ddl-ada")
    shadow.unlink()
    assert mine.read_bytes() == before
    assert mine.with_name("04_ddp.new.ipynb").read_text().endswith("}\n\n")
    assert mine.with_name("03_data_parallel.ipynb").read_text().endswith("}\n\n")


# ---- what is closed ----------------------------------------------------------------------------------------------------------


def test_one_learner_reaches_nothing_of_another(inside, hub):
    inside("ddl-ada")
    bob = inside("ddl-bob")
    ada = f"{hub.url}/user/ddl-ada"
    for url in (f"{ada}/lab", f"{ada}/api/contents/{LESSON}", f"{ada}/api/kernels", f"{ada}/files/{LESSON}"):
        assert bob.get(url).status == 403, url
        stranger = requests.get(url, timeout=60)
        assert "/hub/login" in stranger.url or stranger.status_code == 403, url
    assert bob.get(f"{hub.url}/hub/api/users/ddl-ada").status in (403, 404)
    token = token_of("ddl-bob")
    header = {"Authorization": f"token {token}"}
    assert bob.get(f"{hub.url}/hub/api/users/ddl-bob", headers=header).ok
    assert bob.get(f"{hub.url}/hub/api/users/ddl-ada", headers=header).status in (403, 404)
    assert bob.get(f"{ada}/api/contents", headers=header).status == 403
    past_the_proxy(bob)
    assert run_as("ddl-bob", "ls", home("ddl-ada")).returncode != 0
    job = hub.queue("ddl-ada")[0].split()[0]
    slurm = {**os.environ, "SLURM_CONF": str(hub.folder / "slurm" / "slurm.conf")}
    step = ("srun", f"--jobid={job}", "--overlap", "--ntasks=1", "hostname")
    for command in (("scancel", job), ("scontrol", "update", f"jobid={job}", "timelimit=1"), step):
        done = run_as("ddl-bob", *command, env=slurm)
        assert done.returncode != 0 and re.search("Access/permission denied|Invalid user", done.stderr), (command, done)
    asked = run_as("ddl-bob", "scontrol", "write", "batch_script", job, "-", env=slurm)
    assert "Invalid user id" in asked.stderr and asked.stdout == ""
    assert hub.queue("ddl-ada")[0].split()[0] == job


def past_the_proxy(bob: Visitor) -> None:
    """Who is on the cluster reaches the port of another's server, and the hub's machine that of the proxy's API."""
    ports = [one.laddr.port for one in server_of("ddl-ada").net_connections("inet") if one.status == "LISTEN"]
    assert ports
    for url in [f"http://127.0.0.1:{port}/user/ddl-ada/{path}" for port in ports for path in ("lab", "api/contents")]:
        for name in ("ddl-ada", "ddl-bob"):
            header = {"Authorization": f"token {token_of(name)}"}
            assert requests.get(url, headers=header, timeout=60).ok == (name == "ddl-ada"), (url, name)
        assert bob.get(url, max_redirects=0).status in (302, 403), url  # a browser's cookies don't know of ports
    routes = f"http://127.0.0.1:{urlsplit(bob.hub.url).port + 2}/api/routes"
    header = {"Authorization": f"token {(bob.hub.folder / 'proxy_token').read_text()}"}
    assert requests.get(routes, timeout=60).status_code == 403
    assert "/user/ddl-ada" in requests.get(routes, headers=header, timeout=60).text


def test_a_learners_job_finds_neither_solutions_nor_hidden_tests(hub):
    slurm = {**os.environ, "SLURM_CONF": str(hub.folder / "slurm" / "slurm.conf")}
    look = f"cat {ROOT}/solutions/ex00_start/ex00_start.ipynb; ls {ROOT}/tests; ls {ROOT}"
    done = run_as("ddl-ada", "srun", "--nodes=2", "--mem=100", "sh", "-c", look, env=slurm)
    assert sorted(done.stdout.split()) == ["data", "data"], done
    assert done.stderr.count("No such file or directory") == 4, done


def test_a_form_on_another_site_does_nothing(inside, hub):
    ada = inside("ddl-ada")
    ada.leave()
    page = ada.context.new_page()
    page.set_content(f'<form method=post action="{hub.url}/hub/spawn"><input name=profile value=ranks></form>')
    page.evaluate("document.forms[0].submit()")
    page.wait_for_url(f"{hub.url}/**")
    assert "403" in page.inner_text("body")
    page.screenshot(path=ROOT / "runs" / "screenshots" / "other-site.png")
    page.goto(f"{hub.url}/hub/spawn?profile=ranks&hours=4")  # a link is enough, elsewhere
    assert "choose here, and press Start" in page.inner_text("body")
    assert ada.stopped()
    inside("ddl-ada", lab=False)
    for method, url in (
        ("POST", f"{hub.url}/hub/api/users/ddl-ada/tokens"),
        ("DELETE", f"{hub.url}/hub/api/users/ddl-ada/server"),
        ("POST", f"{ada.server}/api/terminals"),
        ("PUT", f"{ada.server}/api/contents/evil.txt"),
    ):
        answer = ada.context.request.fetch(url, method=method, data="{}", headers={"Origin": "https://evil.example"})
        assert answer.status == 403, url


def test_a_learner_has_one_server(inside, hub):
    ada = inside("ddl-ada", lab=False)
    ada.page.goto(f"{hub.url}/hub/home")
    xsrf = next(one["value"] for one in ada.context.cookies() if one["name"] == "_xsrf" and one["path"] == "/hub/")
    for path, told in (
        ("spawn", "already running"),
        ("spawn/ddl-ada/second", "Named servers are not enabled"),
        ("api/users/ddl-ada/server", "already running"),
        ("api/users/ddl-ada/servers/second", "Named servers are not enabled"),
    ):
        body = {"data": {}} if path.startswith("api") else {"form": {"profile": "small", "hours": "1"}}
        answer = ada.context.request.post(f"{hub.url}/hub/{path}?_xsrf={xsrf}", **body)
        assert answer.status == 400 and told in answer.text(), path
    assert len(hub.queue("ddl-ada")) == 1


def test_tokens_are_in_no_address_no_log_no_list_of_processes_and_no_file_of_others(inside, hub):
    ada = inside("ddl-ada")
    ada.wait_for_notebook()
    token, password = token_of("ddl-ada"), hub.password
    asked = " ".join(ada.addresses)
    assert "ws://" in asked and token not in asked  # as for the other secrets, see visitor
    logs = hub.log() + (home("ddl-ada") / ".course-server.log").read_text()
    everything = " ".join(" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))
    proxy = (hub.folder / "proxy_token").read_text()
    for secret in (token, password, proxy):
        assert secret not in logs and secret not in everything
    own = [hub.folder / name for name in ("password", "proxy_token", "cookie_secret", "hub.sqlite", "hub.log")]
    assert [path.name for path in own if path.stat().st_mode & 0o077] == []
    places = [hub.folder, "/tmp", "/home", ROOT / "data"]
    looked = ["grep", "-rslF", "-D", "skip", "--exclude-dir=site-packages", "-e", token, "-e", proxy, *places]
    assert run_as("ddl-bob", *looked).stdout == ""
    with tempfile.NamedTemporaryFile("w", dir="/tmp") as file:  # he would have found it
        file.write(token)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        assert run_as("ddl-bob", *looked).stdout.split() == [file.name]


def test_what_servers_and_ranks_write_is_their_learners_alone(inside):
    ada = inside("ddl-ada")
    write_notebook("ddl-ada", "notebooks/open.ipynb", *ON_THIS_NODE)
    done = ada.run_all("notebooks/open.ipynb")
    assert errors(done) == []
    assert f"{home('ddl-ada')}/course/course_lib/__init__.py" in printed(done)  # and not the one of the venv
    course, runtime = home("ddl-ada") / "course", Path(server_of("ddl-ada").environ()["JUPYTER_RUNTIME_DIR"])
    assert (course / "runs" / "private" / "checkpoint.pt").exists()
    security = list(home("ddl-ada").glob(".ipython/profile_*/security/*.json"))
    assert security and list(runtime.glob("kernel-*.json"))
    for path in (course, *course.rglob("*"), *security, runtime, *runtime.rglob("*")):
        if not path.is_symlink() and path.exists():
            assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path
    listening = {}  # port: (its address, the programs that have it)
    for one in psutil.process_iter(["username", "cmdline"]):
        if one.info["username"] == "ddl-ada" and any(
            word.startswith("ipyparallel.") for word in one.info["cmdline"] or ()
        ):
            for connection in one.net_connections():
                if connection.status == "LISTEN":
                    names = listening.setdefault(connection.laddr.port, (connection.laddr.ip, set()))[1]
                    names.add(one.name())
    # mpiexec itself listens for helpers on other machines: hub/README.md says so.
    open_to_all = [names for address, names in listening.values() if address != "127.0.0.1"]
    assert len(listening) > 10 and all("mpiexec" in names for names in open_to_all), listening
    clients = [path for path in security if path.name.endswith("-client.json")]
    file = max(clients, key=lambda path: path.stat().st_mtime)
    with ipyparallel.Client(str(file), timeout=20) as client:
        assert len(client.ids) == 2
    with pytest.raises(TimeoutError):  # whoever has the port, but not the key
        ipyparallel.Client({**json.loads(file.read_text()), "key": "guessed"}, timeout=3)


# ---- what breaks -------------------------------------------------------------------------------------------------------------


def lose_the_server(hub, ada: Visitor, how) -> None:
    """The learner is told in Lab, and gets back in; what was saved is there."""
    write_notebook("ddl-ada", "notebooks/kept.ipynb", "print(6 * 7)")
    ada.open("notebooks/kept.ipynb")
    job = hub.queue("ddl-ada")[0].split()[0]
    how(job)
    ada.restart(how.__name__)
    ada.ask_for_a_server()
    ada.wait_for_lab()
    assert "42" in printed(ada.run_all("notebooks/kept.ipynb"))
    assert hub.queue("ddl-ada")[0].split()[0] != job


def test_a_server_whose_job_is_cancelled(inside, hub):
    def cancelled(job: str) -> None:
        hub.ask("scancel", job)

    lose_the_server(hub, inside("ddl-ada"), cancelled)


def test_a_server_whose_node_goes_down(inside, hub):
    """All of its processes die, as when the power fails; the learner goes on on the other one."""
    ada = inside("ddl-ada")
    ada.leave()
    ada = inside("ddl-ada")  # a small one: on one node
    lost, _, node = hub.queue("ddl-ada")[0].split()
    kept = []

    def node_down(job: str) -> None:
        kept.append(hub.power_off(node))
        hub.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")  # Slurm would wait for a minute

    try:
        lose_the_server(hub, ada, node_down)
        assert "JobState=NODE_FAIL" in hub.ask("scontrol", "show", "job", lost)
        assert hub.queue("ddl-ada")[0].split()[2] != node
    finally:
        for place in kept:
            hub.power_on(node, place)
    wait_until(lambda: hub.ask("sinfo", "-h", "-t", "down", "-o", "%N").strip() == "", every=1)  # Slurm takes it back


def test_servers_outlive_the_hub_and_the_proxy(inside, visitor, hub):
    """But not one that still waits in the queue: nobody would know it."""
    ada, bob = inside("ddl-ada"), visitor("ddl-bob")
    bob.log_in()
    bob.leave()
    jobs = hub.queue("ddl-ada")
    write_notebook("ddl-ada", "notebooks/kept.ipynb", "import time\nprint(6 * 7, time.time())")
    assert "42 " in printed(ada.run_all("notebooks/kept.ipynb"))
    file = home("ddl-ada") / "course" / "notebooks" / "kept.ipynb"

    def run_again() -> bool:
        before = file.read_text()
        ada.menu("Run", "Run All Cells")
        wait_until(lambda: printed(watch(ada.page, file, 60)) != printed(json.loads(before)), every=0.5)
        return "42 " in file.read_text()

    fill_the_queue(hub)
    try:
        bob.ask_for_a_server()
        bob.page.wait_for_selector("text=/the cluster is full/")
        hub.end()
        assert run_again()  # without a hub
        assert hub.queue("ddl-bob") != []
        hub.script("up.sh")
        bob.page.wait_for_selector("text=/is not running/")  # by itself: the page must not wait for ever
        bob.shot("hub-restarted")
        wait_until(lambda: hub.queue("ddl-bob") == [], every=0.5)
    finally:
        hub.ask("scancel", "--user=root")
        hub.script("up.sh")
    wait_until(bob.stopped, every=0.5)
    assert hub.queue("ddl-ada") == jobs
    assert ada.get(f"{ada.server}/api/status").ok
    old = hub.pid("proxy")
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: hub.pid("proxy") not in (0, old) and ada.reaches(f"{hub.url}/hub/login"), every=1)
    wait_until(lambda: ada.reaches(f"{ada.server}/api/status"), every=1)
    assert hub.queue("ddl-ada") == jobs
    ada.open("notebooks/kept.ipynb")
    assert run_again()


def test_a_server_that_nobody_uses_is_stopped_and_one_in_use_stays(inside, hub):
    """By the hub's own service and with its rights; only the hour is shortened."""
    inside("ddl-ada", lab=False)
    bob, jobs, users = inside("ddl-bob", lab=False), hub.queue("ddl-ada"), f"{hub.url}/hub/api/users"
    token = {"Authorization": f"token {token_of('ddl-ada')}"}
    children = psutil.Process(hub.pid("hub")).children()
    culler = next(one for one in children if "jupyterhub_idle_culler" in command_of(one))
    *words, hour = culler.cmdline()
    assert hour == "--timeout=3600"

    def is_stopped() -> bool:
        """While ada's server tells the hub that it is used, as servers do every five minutes."""
        used = {"servers": {"": {"last_activity": datetime.now(UTC).isoformat()}}}
        assert requests.post(f"{users}/ddl-ada/activity", json=used, headers=token, timeout=60).ok
        return hub.queue("ddl-bob") == []

    assert not is_stopped()
    with open(hub.folder / "culler.log", "w") as log:
        hasty = [*words, "--timeout=20", "--cull-every=1"]
        quick = subprocess.Popen(hasty, env=culler.environ(), stdout=log, stderr=log)
        try:
            wait_until(is_stopped, every=0.5)
        finally:
            quick.terminate()
            quick.wait(60)
    assert hub.queue("ddl-ada") == jobs and "Culling server ddl-bob" in (hub.folder / "culler.log").read_text()
    wait_until(bob.stopped, every=0.5)
    its = {"Authorization": f"token {culler.environ()['JUPYTERHUB_API_TOKEN']}"}
    for ask, url in (
        (requests.post, f"{users}/ddl-bob/server"),
        (requests.post, f"{users}/ddl-ada/tokens"),
        (requests.get, f"{hub.url}/user/ddl-ada/api/contents"),
    ):
        assert ask(url, headers=its, timeout=60).status_code == 403, url


def fill_the_queue(hub: Hub) -> None:
    hub.ask("sbatch", "--array=1-40", "--ntasks=1", "--mem=1", "--output=/dev/null", "--wrap=sleep 600")


def test_in_a_full_queue_a_learner_is_told_and_waits(visitor, hub):
    bob = visitor("ddl-bob")
    bob.log_in()
    bob.leave()
    fill_the_queue(hub)
    try:
        bob.ask_for_a_server()
        bob.page.wait_for_selector("text=/the cluster is full/")
        bob.shot("full-queue")
        bob.page.click("#stop-server-btn")  # another size, perhaps?
        wait_until(lambda: hub.queue("ddl-bob") == [], every=0.5)
        wait_until(bob.stopped, every=0.5)
        bob.ask_for_a_server()
        bob.page.wait_for_selector("text=/the cluster is full/")
    finally:
        hub.ask("scancel", "--user=root")
    bob.wait_for_lab()


def test_a_server_that_dies_at_once_says_why(visitor):
    """The learner has a file where the course should be."""
    dan, course = visitor("ddl-dan"), home("ddl-dan") / "course"
    course.touch()
    dan.log_in()
    dan.ask_for_a_server()
    dan.page.wait_for_selector("text=/its job ended at once. It said: .*File exists: .*course/")
    dan.shot("died-at-once")
    course.unlink()
    dan.page.click("text=Choose again")
    dan.page.wait_for_selector("#spawn_form")
    dan.ask_for_a_server()
    dan.wait_for_lab()
    dan.leave()


def test_with_a_full_home_the_server_starts_and_the_learner_makes_room(visitor, hub):
    dan = visitor("ddl-dan")
    dan.arrive()
    dan.leave()
    big = [home("ddl-dan") / "course" / f"big{number}.bin" for number in range(2)]

    def fill(file: Path) -> None:
        run_as("ddl-dan", "dd", "if=/dev/zero", f"of={file}", "bs=4k")
        assert shutil.disk_usage(home("ddl-dan")).free == 0

    fill(big[0])
    dan.ask_for_a_server()
    dan.wait_for_lab()
    fill(big[1])  # its new log has made some room
    dan.page.click(".jp-NotebookPanel .jp-Cell")
    before = (home("ddl-dan") / "course" / LESSON).read_bytes()
    dan.page.keyboard.press("Enter")
    dan.page.keyboard.type("x" * 100)
    dan.page.keyboard.press("Control+s")
    dan.page.wait_for_selector(".jp-Dialog >> text=/No space left|disk is full/")
    dan.shot("full-home")
    assert (home("ddl-dan") / "course" / LESSON).read_bytes() == before  # whole
    dan.page.click(".jp-Dialog button >> nth=-1")
    for file in big:
        file.unlink()
    dan.page.keyboard.press("Control+s")
    wait_until(lambda: (home("ddl-dan") / "course" / LESSON).read_bytes() != before, every=0.5)


# ---- the way out, and the way in without a hub --------------------------------------------------------------------------------


def test_who_logs_out_is_out(inside, hub):
    ada = inside("ddl-ada")
    ada.page.goto(f"{hub.url}/hub/home")
    ada.page.click("#logout")
    ada.page.wait_for_url("**/hub/login*")
    ada.shot("out")
    assert "/hub/login" in ada.get(f"{hub.url}/hub/home").url
    answer = ada.get(f"{ada.server}/api/contents")
    assert answer.status == 403 or "/hub/login" in answer.url


def test_with_tls_and_the_machines_own_passwords(browser, tmp_path):
    """What a centre's hub has instead of the demo's one password."""
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    with start_hub(["ddl-eve", "ddl-fay"], tls=tmp_path) as hub:
        subprocess.run("chpasswd", input="ddl-eve:correct horse\nddl-fay:battery staple", text=True, check=True)
        eve = Visitor(browser, hub, "ddl-eve")
        for password in ("battery staple", hub.password):
            eve.log_in(password)
            eve.page.wait_for_selector("text=Invalid username or password")
        eve.log_in("correct horse")
        eve.page.wait_for_selector("#spawn_form")
        eve.ask_for_a_server()
        eve.wait_for_lab()
        assert eve.page.url.startswith("https:")
        assert {one["name"] for one in eve.context.cookies() if not one["secure"]} <= {"_xsrf"}  # it lets nobody in
        eve.shot("tls")
        assert_taken_off(eve)
        eve.context.close()


def assert_taken_off(eve: Visitor) -> None:
    """Who is on the list no more when the hub starts again, with a browser that is still logged in and a server that runs."""
    hub, settings = eve.hub, Path(eve.hub.env["COURSE_HUB_SITE"])
    settings.write_text(settings.read_text().replace('"ddl-eve", ', ""))
    assert hub.queue("ddl-eve") != []
    hub.end()
    hub.script("up.sh")
    wait_until(lambda: hub.queue("ddl-eve") == [], every=0.5)
    for page in ("spawn", "api/users/ddl-eve"):
        assert eve.get(f"{hub.url}/hub/{page}").status in (403, 404), page


@pytest.mark.timeout(900)
def test_make_lab_and_run_all_of_lesson_01(browser):
    """The plain way, without a hub: no errors, and every figure drawn."""
    folder, claim = ROOT / "runs" / "in_a_browser", claim_ports()
    folder.mkdir(parents=True, exist_ok=True)
    notebook = json.loads((ROOT / "notebooks" / "01_baseline.ipynb").read_text())
    cell = next(cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", []))
    values = smoke_parameters("01_baseline") | {"runs": str(folder)}
    values |= {"data": str(ROOT / "data" / "smoke"), "real_data": str(ROOT / "data" / "ncep")}
    cell["source"] = "".join(cell["source"]) + "".join(f"\n{name} = {value!r}" for name, value in values.items())
    file = folder / "01_baseline.ipynb"
    file.write_text(json.dumps(notebook))
    drawn = sum("plots." in "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    flags = f"--allow-root --no-browser --port={next_port(claim)} --IdentityProvider.token=test"
    command = ["make", "-C", str(ROOT), "lab", f"LAB_FLAGS={flags}"]
    log = open(folder / "lab.log", "w")
    lab = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{next_port(claim)}"
    root = Visitor(browser, Hub(folder, url, {}), "root")
    root.server = url
    try:
        wait_until(lambda: answers(f"{url}/api"), every=0.5)
        root.page.goto(f"{url}/?token=test")
        root.page.wait_for_selector(".lm-TabBar-tabLabel:text-is('00_start.ipynb')")  # make lab opens the first lesson
        root.shot("make-lab")
        root.open("runs/in_a_browser/01_baseline.ipynb")
        root.menu("Run", "Run All Cells")
        done = watch(root.page, file, 600)
        root.shot("lesson-01")
        assert errors(done) == []
        assert figures(done) == drawn >= 5, (figures(done), drawn)
        root.see_figures(drawn)
    finally:
        root.context.close()
        os.killpg(lab.pid, signal.SIGTERM)
        lab.wait(60)
        log.close()
        claim.close()


def answers(url: str) -> bool:
    return subprocess.run(["curl", "-fsS", "-o", "/dev/null", url], capture_output=True, check=False).returncode == 0
