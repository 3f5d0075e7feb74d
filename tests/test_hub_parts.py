"""The hub's parts without a hub: a site's settings, a learner's copy of the course, what is published, what may be asked for."""

import asyncio
import errno
import grp
import json
import os
import re
import resource
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

if os.environ.get("CI") != "true":  # there it must not be missing
    pytest.importorskip("batchspawner", reason="JupyterHub is not installed: make .venv/bin/configurable-http-proxy")
import batchspawner
from batchspawner.batchspawner import JobStatus
from exercise_cells import code_cells, open_notebook
from helpers import ROOT, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyterhub.apihandlers import default_handlers
from jupyterhub.app import JupyterHub
from lightning.fabric.plugins.environments import SLURMEnvironment
from tornado import web
from traitlets.config import Config as Traits
from traitlets.config.loader import PyFileConfigLoader

from course_lib.config import UserError
from course_lib.scheduler import ACTIVE
from hub import port, publish, pull, site, spawner
from lessons.build import exercise_sources

SHIPPED = (ROOT / "hub" / "site.toml").read_text()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---- a site's settings -----------------------------------------------------------------------------------------------------


def edited(tmp_path: Path, **values: str) -> Path:
    """The shipped file with other values, in TOML; of a profile's words the first."""
    text = SHIPPED
    for word, value in values.items():
        line = f"{word} = {value}"
        text, count = re.subn(rf"(?m)^{word} = .*$", lambda match, line=line: line, text, count=1)
        assert count == 1, word
    return written(tmp_path, text)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "our.toml"
    path.write_text(text)
    return path


def complaint_about(path: Path) -> str:
    with pytest.raises(UserError) as raised:
        site.read(path)
    told = str(raised.value)
    assert told.startswith(f"{path}: ") and "\n" not in told
    return told


def test_the_shipped_settings_are_valid(monkeypatch):
    monkeypatch.delenv("COURSE_HUB_SITE", raising=False)
    read = site.read()
    assert read.hub.authenticator == "demo" and read.profile("ranks").options.startswith("--nodes=2")
    assert read.slurm.hours[0] == 1 and [one.name for one in read.profiles] == ["small", "ranks"]


def test_the_profile_in_the_shipped_comment_is_valid_too(tmp_path):
    text = re.sub(r"(?m)^# (?=\[\[|name|title|options)", "", SHIPPED)
    assert [one.name for one in site.read(written(tmp_path, text)).profiles] == ["small", "ranks", "gpu"]


def test_another_file_is_named_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_HUB_SITE", str(edited(tmp_path, servers="7")))
    assert site.read().hub.servers == 7


@pytest.mark.parametrize(
    "values, named",
    [
        ({"url": '"hub.centre.org"'}, "url = 'hub.centre.org'"),
        ({"url": '"ftp://127.0.0.1"'}, "ftp://127.0.0.1"),
        ({"url": '"http://"'}, "url"),
        ({"url": '"https://127.0.0.1:8000"'}, "tls_key and tls_cert"),
        ({"url": '"https://127.0.0.1"', "tls_key": '"/nowhere/key"'}, "tls_key and tls_cert"),
        ({"url": '"https://127.0.0.1"', "tls_key": '"/nowhere/key"', "tls_cert": '"/nowhere/cert"'}, "/nowhere/key"),
        ({"url": '"http://127.0.0.1"', "tls_key": '"/nowhere/key"'}, "/nowhere/key can't be read"),
        ({"name": '"ranks"'}, "no two of the same name"),
        ({"name": '"Small one"'}, "'Small one'"),
        ({"name": '""'}, "''"),
        *(({"hours": hours}, "hours") for hours in ("[]", "[0]", "[-1]", '["2"]', "[1.5]")),
        ({"servers": '"60"'}, "[hub] servers = '60' must be a int"),
        ({"idle_minutes": "true"}, "[hub] idle_minutes = True"),
        ({"learners": '"learner1"'}, "[hub] learners"),
        ({"hours": "4"}, "[slurm] hours"),
        ({"venv": "3"}, "[course] venv"),
        ({"title": "3"}, "[profile] title"),
    ],
)
def test_a_wrong_value_is_named(values, named, tmp_path):
    assert named in complaint_about(edited(tmp_path, **values))


@pytest.mark.parametrize("word", re.findall(r"(?m)^(\w+) =", SHIPPED.partition("name =")[0]))
def test_a_missing_line_is_named(word, tmp_path):
    assert f" has no {word};" in complaint_about(written(tmp_path, re.sub(rf"(?m)^{word} = .*$", "", SHIPPED)))


def test_a_missing_line_of_a_profile_is_named(tmp_path):
    text = SHIPPED.replace('title = "CPU, small: two cores"\n', "")
    assert "[profile] has no title" in complaint_about(written(tmp_path, text))


@pytest.mark.parametrize(
    "old, new, named",
    [
        ("[hub]", "[hub]\nport = 8000", "[hub] has a port"),
        ("[course]", "[course]\nhome = ''", "[course] has a home"),
        ('name = "small"', 'name = "small"\ngpus = 4', "[profile] has a gpus"),
        ("[slurm]", "[slrum]", "[slurm] has no"),
        ("[hub]", "[extra]\n[hub]", "nobody knows what extra is"),
        ("[hub]", "servers = 3\n[hub]", "nobody knows what servers is"),
        ("servers = 60", "servers = sixty", "line"),
        ("[slurm]", "[slurm", "line"),
    ],
)
def test_a_word_that_nobody_reads_is_named(old, new, named, tmp_path):
    assert named in complaint_about(written(tmp_path, SHIPPED.replace(old, new, 1)))


def test_a_site_without_a_profile_is_refused(tmp_path):
    assert "[[profile]]" in complaint_about(written(tmp_path, SHIPPED.partition("[[profile]]")[0]))


def test_a_missing_file_is_named(tmp_path):
    assert "No such file" in complaint_about(tmp_path / "none.toml")


@pytest.mark.parametrize("host", ["hub.centre.org", "0.0.0.0", "192.168.1.7", "127.0.0.1.centre.org"])
def test_one_password_for_all_stays_on_this_machine(host, tmp_path):
    (tmp_path / "pem").touch()
    told = complaint_about(
        edited(tmp_path, url=f'"https://{host}"', tls_key=f'"{tmp_path}/pem"', tls_cert=f'"{tmp_path}/pem"')
    )
    assert '"demo"' in told and host in told


def test_the_hub_itself_has_a_login_page_too_and_the_demo_keeps_it_on_this_machine(tmp_path):
    told = complaint_about(edited(tmp_path, address='"192.168.1.7"'))
    assert '"demo"' in told and "192.168.1.7" in told


@pytest.mark.parametrize(
    "name",
    [
        "",
        "null",
        "Dummy",
        "shared-password",
        "jupyterhub.auth.DummyAuthenticator",
        "jupyterhub.auth.NullAuthenticator",
        "jupyterhub.authenticators.shared.SharedPasswordAuthenticator",
    ],
)
def test_nobody_logs_in_with_no_password_or_with_that_of_another(name, tmp_path):
    (tmp_path / "pem").touch()
    pem = f'"{tmp_path}/pem"'
    values = {"url": '"https://hub.centre.org"', "tls_key": pem, "tls_cert": pem, "authenticator": f'"{name}"'}
    assert f'authenticator = "{name}" asks for no password' in complaint_about(edited(tmp_path, **values))


@pytest.mark.parametrize("url", ["http://hub.centre.org", "https://hub.centre.org", "http://0.0.0.0:8000"])
def test_no_password_crosses_the_network_in_plain_text(url, tmp_path):
    told = complaint_about(edited(tmp_path, url=f'"{url}"', authenticator='"pam"'))
    assert "tls_key and tls_cert are missing" in told


def test_a_centre_with_its_own_logins_and_tls_is_accepted(tmp_path):
    (tmp_path / "pem").touch()
    pem, url = f'"{tmp_path}/pem"', '"https://hub.centre.org"'
    read = site.read(edited(tmp_path, url=url, authenticator='"pam"', tls_key=pem, tls_cert=pem, learners="[]"))
    assert read.hub.learners == []
    told = complaint_about(edited(tmp_path, url='"http://127.0.0.1"', tls_key=pem, tls_cert=pem))
    assert "belong together" in told


@pytest.mark.parametrize(
    "options",
    [
        "--mem=1; touch x",
        "--mem=1;id",
        "--mem=1 && id",
        "--mem=1|id",
        "--comment=$(id)",
        "--comment=`id`",
        "--comment=$HOME",
        "--comment='a b'",
        "--comment={{cmd}}",
        "--mem=1\\nid",
        "--mem=1 # all",
        "--mem=1>x",
        "--mem",
        "--mem=",
        "-N1",
        "nodes=1",
        "--nodes 1",
    ],
)
def test_options_with_text_for_a_shell_are_refused(options, tmp_path):
    assert "options of small must be like --nodes=1" in complaint_about(edited(tmp_path, options=f'"{options}"'))


@pytest.mark.parametrize("options", ["", "--nodes=2  --gpus-per-node=a100:4", "--nodelist=n1,n2 --qos=class_1.5"])
def test_what_sbatch_understands_is_accepted(options, tmp_path):
    assert site.read(edited(tmp_path, options=f'"{options}"')).profiles[0].options == options


@pytest.mark.parametrize(
    "old, new",
    [
        ("[[profile]]", "[profile]"),
        ("[hub]", "[[hub]]"),
        ("--mem=3000", "--mem='3000"),
        ("127.0.0.1:8000", "127.0.0.1:80000"),
        ("127.0.0.1:8000", "127.0.0.1:eight"),
        ("http://127.0.0.1:8000", "http://[::1:8000"),
        ("start_minutes = 10", "start_minutes = 0"),
        ("servers = 60", "servers = -1"),
        ("idle_minutes = 60", "idle_minutes = -1"),
        ('"demo"', '"dummy"'),
        ('address = "127.0.0.1"', 'address = ""'),
        ("127.0.0.1:8000", "127.0.0.1:65534"),
        ('"learner1"', "1"),  # accepted; jupyterhub_config.py then fails
        ("hours = [1,", "hours = [true,"),
        ('partition = "course"', 'partition = "course\\ntouch x"'),  # accepted: a line of the job's script
        ('venv = ""', 'venv = "a b"'),  # accepted: unquoted, and relative to a home
    ],
)
def test_a_mistake_is_told_before_the_class_finds_it(old, new, tmp_path):
    last = SHIPPED.rfind("[[profile]]\nname") if old == "[[profile]]" else len(SHIPPED)  # one table is enough
    text = SHIPPED[:last].replace(old, new, 1)
    assert text != SHIPPED[:last]
    complaint_about(written(tmp_path, text))


def test_the_command_says_what_is_wrong_in_one_line_and_what_a_shell_asks_for(tmp_path):
    def ask(path: Path, *words: str) -> subprocess.CompletedProcess:
        environment, command = os.environ | {"COURSE_HUB_SITE": str(path)}, [sys.executable, "-m", "hub.site", *words]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    wrong = edited(tmp_path, servers="-3")
    done = ask(wrong)
    assert (done.returncode, done.stderr) == (2, f"error: {wrong}: servers = -3: 0 means no limit\n")
    assert ask(ROOT / "hub" / "site.toml", "learners").stdout == "learner1 learner2\n"


# ---- the hub's configuration -----------------------------------------------------------------------------------------------

README = (ROOT / "hub" / "README.md").read_text()


def load(path: Path, state: Path, settings: Path, monkeypatch) -> Traits:
    """What JupyterHub reads, with this site.toml and this folder of state."""
    monkeypatch.setenv("COURSE_HUB_STATE", str(state))
    monkeypatch.setenv("COURSE_HUB_SITE", str(settings))
    monkeypatch.setattr(sys, "path", [*sys.path])
    (state / "password").write_text("for all\n")
    return PyFileConfigLoader(path.name, path=str(path.parent)).load_config()


def test_a_centres_own_class_for_logins_and_a_service_are_lines_of_the_readme(tmp_path, monkeypatch):
    """Its config.py, with our file where it says /srv/course, and a class of that name in place of the package's."""
    snippets = re.findall(r"(?m)^ {7}(?:file = |token = )(?:.*\n {7})*.*$", README)
    text = re.sub(r"(?m)^ {7}", "", "\n".join(snippets)).replace("/srv/course/", f"{ROOT}/")
    text = text.replace("/etc/course-hub/", f"{tmp_path}/")
    (tmp_path / "attendance.token").write_text("a" * 64)
    own = written(tmp_path, text).rename(tmp_path / "config.py")
    package = tmp_path / "oauthenticator" / "generic.py"
    write(
        package,
        "from jupyterhub.auth import Authenticator\nfrom traitlets import Unicode\n"
        "class GenericOAuthenticator(Authenticator):\n    client_id = Unicode(config=True)\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    settings = edited(tmp_path, authenticator='"oauthenticator.generic.GenericOAuthenticator"')
    app = JupyterHub(config=load(own, tmp_path, settings, monkeypatch))
    assert app.authenticator_class.__module__ == "oauthenticator.generic"
    authenticator = app.authenticator_class(parent=app)
    assert authenticator.client_id == "…" and authenticator.allowed_users == {"teacher", "learner1", "learner2"}
    assert [one["name"] for one in app.services] == ["idle-culler", "attendance"]
    role = app.load_roles[-1]
    assert (role["services"], role["scopes"]) == (["attendance"], ["list:users", "read:servers"])
    assert app.services[-1]["api_token"] == "a" * 64


@pytest.fixture
def authenticator(tmp_path, monkeypatch):
    """The demo's, on a hub that ada and learner1 have used before."""
    with sqlite3.connect(tmp_path / "hub.sqlite") as database:
        database.execute("CREATE TABLE users (name TEXT)")
        database.executemany("INSERT INTO users VALUES (?)", [("ada",), ("learner1",)])
    path = ROOT / "hub" / "jupyterhub_config.py"
    app = JupyterHub(config=load(path, tmp_path, ROOT / "hub" / "site.toml", monkeypatch))
    return app.authenticator_class(parent=app)


def test_who_is_taken_off_the_list_is_out_and_root_never_in(authenticator):
    assert {"ada", "root"} <= authenticator.blocked_users and "learner1" not in authenticator.blocked_users


@pytest.mark.parametrize("name", ["", "-u", "a b", "a;id", "$(id)", "a\nid", "a\n", "ada'", "../ada", "0", "é"])
def test_a_name_that_a_shell_would_take_apart_is_nobodys(name, authenticator):
    assert not authenticator.validate_username(name)
    assert authenticator.validate_username("ada.b-c_2")


# ---- a learner's copy of the course ----------------------------------------------------------------------------------------

FIRST = {"a.py": "a 1", "notebooks/00.ipynb": "n 1", "slurm/run.sh": "r 1", "Makefile": "m 1"}
SECOND = {"a.py": "a 2", "notebooks/00.ipynb": "n 2", "slurm/run.sh": "r 2", "Makefile": "m 2", "z/new.py": "z 2"}


@pytest.fixture
def published(tmp_path) -> Path:
    return release(tmp_path / "published", FIRST)


@pytest.fixture
def copy(tmp_path) -> Path:
    return tmp_path / "home" / "course"


def release(folder: Path, files: dict[str, str]) -> Path:
    """A published course: these files and no other."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in files.items():
        write(folder / name, text)
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def files_of(copy: Path) -> dict[str, str]:
    """All but the note, hidden ones too, and nothing that is linked."""
    names = {str(path.relative_to(copy)): path for path in copy.rglob("*") if path.is_file() and not path.is_symlink()}
    return {name: path.read_text() for name, path in names.items() if name != pull.NOTE}


def program(*words: object, **options) -> subprocess.CompletedProcess:
    """As a job runs it; without any package, and with the job's umask."""
    command = [sys.executable, "-I", "-S", ROOT / "hub" / "pull.py", *words]
    return subprocess.run(command, umask=0o077, capture_output=True, text=True, timeout=60, check=False, **options)


def test_a_new_copy_is_the_published_course(published, copy):
    assert pull.pull(published, copy)["new"] == sorted(FIRST)
    assert files_of(copy) == FIRST


def test_a_second_pull_does_nothing(published, copy):
    pull.pull(published, copy)
    write(copy / "a.py", "mine")
    (copy / "Makefile").unlink()
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != pull.NOTE and path.is_file()}
    assert not any(pull.pull(published, copy).values())
    assert before == {path: path.stat().st_mtime_ns for path in before} and "Makefile" not in files_of(copy)


def test_an_untouched_file_is_replaced(published, copy):
    pull.pull(published, copy)
    done = pull.pull(release(published, SECOND), copy)
    assert done == {"new": ["z/new.py"], "updated": sorted(FIRST), "kept": []}
    assert files_of(copy) == SECOND


@pytest.mark.parametrize(
    "name, beside",
    [("a.py", "a.new.py"), ("notebooks/00.ipynb", "notebooks/00.new.ipynb"), ("Makefile", "Makefile.new")],
)
def test_a_learners_work_is_kept_and_the_new_file_put_beside_it(name, beside, published, copy):
    pull.pull(published, copy)
    write(copy / name, "mine")
    assert pull.pull(release(published, SECOND), copy)["kept"] == [name]
    assert files_of(copy) == SECOND | {name: "mine", beside: SECOND[name]}
    (copy / beside).unlink()
    assert not any(pull.pull(published, copy).values())  # it is not put there a second time
    assert files_of(copy) == SECOND | {name: "mine"}


def test_a_removed_file_stays_away_until_there_is_a_newer_one(published, copy):
    pull.pull(published, copy)
    (copy / "a.py").unlink()
    pull.pull(published, copy)
    assert "a.py" not in files_of(copy)
    pull.pull(release(published, SECOND), copy)
    assert files_of(copy) == SECOND


def test_who_has_the_new_file_already_keeps_it_as_delivered(published, copy):
    pull.pull(published, copy)
    write(copy / "a.py", "a 2")
    assert "a.py" not in sum(pull.pull(release(published, SECOND), copy).values(), [])
    assert pull.pull(release(published, SECOND | {"a.py": "a 3"}), copy)["updated"] == ["a.py"]


def test_a_learners_own_files_are_never_touched(published, copy):
    own = {"mine.py": "x", "notebooks/try.ipynb": "y", "runs/a/metrics.jsonl": "z", "z/new.py": "mine"}
    for name, text in own.items():
        write(copy / name, text)
    pull.pull(published, copy)
    pull.pull(release(published, SECOND), copy)
    assert files_of(copy) == SECOND | own | {"z/new.new.py": "z 2"}


def test_what_is_no_longer_published_stays(published, copy):
    pull.pull(published, copy)
    pull.pull(release(published, {"a.py": "a 2"}), copy)
    assert files_of(copy) == FIRST | {"a.py": "a 2"}


names = st.sampled_from(["a.py", "b", "notebooks/00.ipynb"])
acts = st.one_of(
    st.tuples(st.just("write"), names | st.sampled_from(["mine.py", "notebooks/mine.ipynb"]), st.integers(0, 3)),
    st.tuples(st.just("remove"), names, st.none()),
    st.tuples(st.just("publish"), st.dictionaries(names, st.integers(0, 3), min_size=1), st.none()),
)


@settings(max_examples=60)
@given(st.lists(acts, max_size=12))
def test_what_a_learner_has_written_is_there_after_any_edits_and_updates(history):
    with tempfile.TemporaryDirectory() as folder:
        published, copy, own = Path(folder, "published"), Path(folder, "course"), {}
        for act, what, number in [("publish", {"a.py": 0, "b": 0}, None), *history]:
            if act == "write":
                own[what] = f"mine {number}"
                write(copy / what, own[what])
            elif act == "remove":
                own.pop(what, None)
                (copy / what).unlink(missing_ok=True)
            else:
                release(published, {name: f"version {version}" for name, version in what.items()})
                pull.pull(published, copy)
                assert not any(pull.pull(published, copy).values())
            assert own.items() <= files_of(copy).items()  # under its own name, even


@pytest.fixture
def around(tmp_path) -> tuple[Path, Path]:
    """A venv and a folder of data."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    release(tmp_path / "data", {"years/T_1980.nc": "t", "digits/images": "d"})
    return tmp_path / "venv", tmp_path / "data"


def test_the_program_makes_a_copy_that_is_a_learners_alone(published, copy, around):
    (published / "slurm" / "run.sh").chmod(0o755)
    done = program(published, copy, *around)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["new: 4 files", "updated: 0 files", "kept: 0 files"]
    assert mode_of(copy / "slurm" / "run.sh") == 0o700 and mode_of(copy / "a.py") == 0o600
    own = [path for path in (copy, *copy.rglob("*")) if not path.is_symlink()]
    assert {mode_of(path) for path in own if path.is_dir()} == {0o700}
    assert {mode_of(path) for path in own if path.is_file()} == {0o600, 0o700}


def test_the_program_says_what_it_has_kept(published, copy, around):
    program(published, copy, *around)
    write(copy / "a.py", "mine")
    done = program(release(published, SECOND), copy, *around)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "kept: 1 files a.py"


def test_a_file_that_was_read_only_can_be_written_to(published, copy):
    (published / "a.py").chmod(0o444)
    pull.pull(published, copy)
    assert mode_of(copy / "a.py") == 0o600


def test_the_venv_and_every_folder_of_data_are_linked(published, copy, around, tmp_path):
    venv, data = around
    program(published, copy, venv, data)
    assert (copy / ".venv").readlink() == venv and (copy / "data" / "years").readlink() == data / "years"
    assert not (copy / "data").is_symlink() and (copy / "data" / "digits" / "images").read_text() == "d"
    moved = venv.rename(tmp_path / "venv2")
    program(published, copy, moved, data)
    assert (copy / ".venv").readlink() == moved


def test_a_learners_own_folder_of_data_and_venv_stay(published, copy, around):
    own = {"data/years/T_1980.nc": "mine", "data/more/x": "mine", ".venv/bin/python": "mine"}
    for name, text in own.items():
        write(copy / name, text)
    done = program(published, copy, *around)
    assert done.returncode == 0 and files_of(copy) == FIRST | own
    assert (copy / "data" / "digits").is_symlink() and (around[1] / "years" / "T_1980.nc").read_text() == "t"


def test_a_course_that_is_not_published_is_one_clear_line(copy, around, tmp_path):
    done = program(tmp_path / "none", copy, *around)
    assert done.returncode == 1 and not copy.exists()
    assert done.stderr.splitlines() == [
        f"{tmp_path / 'none'} is missing: the course has not been published; see hub/README.md"
    ]


def test_without_its_words_the_program_says_how_it_is_called():
    done = program()
    assert done.returncode == 2 and "python pull.py PUBLISHED COPY VENV DATA" in done.stderr


# ---- a full disk -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_here(published, copy, around, monkeypatch):
    """The program's main() in this process, on a disk that has room for so many files, and half of another."""

    def run(room: int | None = None) -> int:
        real, copied = shutil.copyfile, []

        def copyfile(source, target):
            if len(copied) == room:
                Path(target).write_bytes(Path(source).read_bytes()[:1])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
            copied.append(target)
            return real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copyfile", copyfile)
            patch.setattr(sys, "argv", ["pull.py", str(published), str(copy), *map(str, around)])
            return pull.main()

    return run


@pytest.mark.parametrize("room", range(5))
def test_a_full_disk_loses_nothing_and_the_next_pull_completes(room, published, copy, run_here, capsys):
    assert run_here() == 0
    write(copy / "Makefile", "mine")
    write(copy / "own.py", "own")
    before = files_of(copy)
    release(published, SECOND)
    assert run_here(room) == 0
    assert "could not be brought up to date: [Errno 28] No space left" in capsys.readouterr().err
    now = files_of(copy)
    assert not [name for name in now if name.endswith(".half")]
    assert before.keys() <= now.keys() and all(
        text in (before.get(name), *SECOND.values()) for name, text in now.items()
    )
    assert now["Makefile"] == "mine" and now["own.py"] == "own"
    assert run_here() == 0
    assert files_of(copy) == SECOND | {"Makefile": "mine", "Makefile.new": "m 2", "own.py": "own"}


@pytest.mark.parametrize("room", range(4))
def test_a_first_copy_that_does_not_fit_goes_on_later(room, copy, run_here, capsys):
    assert run_here(room) == 0  # with a server the learner can make room
    assert "No space left" in capsys.readouterr().err
    assert files_of(copy).items() <= FIRST.items() and len(files_of(copy)) == room
    assert run_here() == 0
    assert files_of(copy) == FIRST


def test_a_disk_that_takes_no_large_file_keeps_the_old_one_whole(published, copy, around):
    """No patch: the system itself refuses, in the middle of a file, as it does over a quota."""
    program(published, copy, *around)
    release(published, SECOND | {"a.py": "a" * 100_000})
    limit = (50_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    done = program(published, copy, *around, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert done.returncode == 0 and "could not be brought up to date" in done.stderr
    assert files_of(copy)["a.py"] == "a 1" and not list(copy.rglob("*.half"))
    assert program(published, copy, *around).returncode == 0
    assert files_of(copy)["a.py"] == "a" * 100_000


# ---- what a learner may have done meanwhile --------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["they went on in the new file", "it is a file of their own"])
def test_what_a_learner_has_written_beside_is_there_after_an_update(when, published, copy):
    pull.pull(published, copy)
    write(copy / "a.py", "mine")
    if when == "they went on in the new file":
        pull.pull(release(published, SECOND), copy)
    write(copy / "a.new.py", "mine too")
    pull.pull(release(published, SECOND | {"a.py": "a 3"}), copy)
    assert "mine too" in files_of(copy).values()


@pytest.mark.parametrize("note", ["", "{", "[]"])
def test_a_spoilt_note_does_not_keep_a_server_from_starting(note, published, copy, around):
    program(published, copy, *around)
    (copy / pull.NOTE).write_text(note)
    assert program(release(published, SECOND), copy, *around).returncode == 0
    assert json.loads((copy / pull.NOTE).read_text()).keys() >= SECOND.keys()


@pytest.mark.parametrize("what", ["a folder in place of a file", "a file in place of a folder"])
def test_a_learners_folder_in_place_of_a_file_does_not_keep_the_others_from_being_updated(what, published, copy):
    pull.pull(published, copy)
    if what == "a folder in place of a file":
        (copy / "a.py").unlink()
        write(copy / "a.py" / "mine", "mine")
    else:
        shutil.rmtree(copy / "notebooks")
        write(copy / "notebooks", "mine")
    try:
        pull.pull(release(published, SECOND), copy)
    except OSError as error:
        print(error)
    assert files_of(copy)["slurm/run.sh"] == "r 2"


def test_an_update_that_was_cut_short_leaves_no_file_that_counts_as_changed(published, copy, run_here):
    run_here()
    release(published, SECOND)
    run_here(room=2)
    release(published, {name: text.replace("2", "3") for name, text in SECOND.items()})
    run_here()
    assert not [name for name in files_of(copy) if ".new" in name]


def test_a_note_that_does_not_fit_leaves_no_half(published, copy, around):
    release(published, {f"{number}.py": "" for number in range(100)})
    limit = (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    done = program(published, copy, *around, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert "could not be brought" in done.stderr and not list(copy.glob("*.half"))


# ---- what is published -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """This repository, published by the real command for a group that whoever tests belongs to."""
    folder = tmp_path_factory.mktemp("srv") / "course"
    group = grp.getgrgid(os.getgid()).gr_name
    command = [sys.executable, "-m", "hub.publish", folder, "--teachers", group]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) == 2
    return folder


def test_learners_get_no_solutions_tests_or_hidden_checks(course):
    learners = course / "learners"
    for name in ("solutions", "tests", "benchmarks", "lessons/exercises", "lessons/grade.py", "lessons/TEACHING.md"):
        assert not (learners / name).exists(), name
    text = "\n".join(path.read_text(errors="replace") for path in learners.rglob("*") if path.is_file())
    notebooks = "\n".join(path.read_text() for path in learners.rglob("*.ipynb"))
    assert "BEGIN SOLUTION" not in notebooks and "BEGIN HIDDEN" not in notebooks
    hidden = 0
    for source in exercise_sources():
        for cell in code_cells(open_notebook("solutions", source.stem)):
            for check in re.findall(r"### BEGIN HIDDEN TESTS\n(.+?)\n\s*### END HIDDEN TESTS", cell.source, re.S):
                hidden += 1
                assert check not in text and json.dumps(check)[1:-1] not in text, f"{source.stem}: {check}"
    assert hidden > 10


def test_learners_get_what_their_servers_start_with(course):
    learners = course / "learners"
    assert {path.name for path in (learners / "hub").iterdir()} == {"pull.py", "learners", "path"}
    for name in (
        "nbgrader_config.py",
        "notebooks/00_start.ipynb",
        "course_lib/train.py",
        "exercises/ex04_ddp/ex04_ddp.ipynb",
    ):
        assert (learners / name).read_bytes() == (ROOT / name).read_bytes()


def test_everybody_can_read_what_learners_get_and_nobody_write_to_it(course):
    paths = [course / "learners", *(course / "learners").rglob("*")]
    assert {mode_of(path) for path in paths if path.is_dir()} == {0o755}
    assert {mode_of(path) for path in paths if path.is_file()} == {0o644, 0o755}
    assert mode_of(course / "learners" / "slurm" / "sweep.sh") == 0o755


def test_what_teachers_get_is_whole_and_closed_to_others(course):
    teachers = course / "teachers"
    assert mode_of(teachers) == 0o750 and teachers.stat().st_gid == os.getgid()
    for name in ("solutions/ex04_ddp/ex04_ddp.ipynb", "lessons/grade.py", "hub/pull.py", "nbgrader_config.py"):
        assert (teachers / name).read_bytes() == (ROOT / name).read_bytes()


def test_publishing_again_replaces_and_removes_what_is_gone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(publish, "ROOT", release(tmp_path / "repository", SECOND))
    folder = tmp_path / "srv" / "learners"
    publish.publish(folder, list(FIRST))
    assert files_of(folder) == {name: SECOND[name] for name in FIRST}
    publish.publish(folder, ["a.py", "z/new.py"])
    assert files_of(folder) == {"a.py": "a 2", "z/new.py": "z 2"}
    publish.publish(folder, ["a.py"])
    assert (
        len(list(folder.parent.iterdir())) == 3
    )  # the link, this course and the last one, which a server may be reading
    publish.publish(folder, ["a.py", "z/new.py"])
    assert capsys.readouterr().out.splitlines()[-1] == f"published 2 files in {folder}"


def test_publishing_that_breaks_off_leaves_the_old_course_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "ROOT", release(tmp_path / "repository", FIRST))
    folder = tmp_path / "srv" / "learners"
    publish.publish(folder, list(FIRST))
    with pytest.raises(FileNotFoundError):
        publish.publish(folder, ["a.py", "gone.py"])
    assert files_of(folder) == FIRST
    publish.publish(folder, ["a.py"])
    assert files_of(folder) == {"a.py": "a 1"}


@pytest.mark.parametrize("script", ["hub/up.sh", "slurm/local/up.sh"])
def test_a_folder_that_somebody_else_has_linked_is_refused(script, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").symlink_to("theirs")
    done = subprocess.run([ROOT / script, tmp_path / "ours"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "name another folder" in done.stderr
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.mark.integration
def test_another_program_at_the_hubs_port_is_told_in_one_line(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("the hub needs root")
    with socket.create_server(("127.0.0.1", 0)) as other:

        def hang_up() -> None:
            other.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        environment = os.environ | {"COURSE_HUB_SITE": str(edited(tmp_path, url=f'"{url}"'))}
        command = [ROOT / "hub/up.sh", tmp_path / "state"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and re.fullmatch(f"another program listens at {url}: .*\n", done.stderr)
    assert list((tmp_path / "state").iterdir()) == []  # and nothing was started


@pytest.mark.parametrize("script, name", [("hub/down.sh", "proxy"), ("slurm/local/down.sh", "run/munged")])
def test_a_number_that_another_process_has_by_now_is_left_alone(script, name, tmp_path):
    """After a restart of the machine the files with numbers are still there."""
    with subprocess.Popen(["sleep", "60"]) as other:
        path = tmp_path / f"{name}.pid"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{other.pid}\n")
        subprocess.run([ROOT / script, tmp_path], timeout=60, check=True)
        assert other.poll() is None
        other.kill()


# ---- what a learner may ask for --------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> spawner.CourseSpawner:
    user = SimpleNamespace(db=SimpleNamespace(commit=lambda: None))
    return spawner.CourseSpawner(site=site.read(ROOT / "hub" / "site.toml"), user=user)


def test_the_form_has_every_profile_and_every_hour_and_the_first_is_chosen(server):
    form = server.options_form(server)
    for profile in server.site.profiles:
        assert f'name="profile" value="{profile.name}"' in form and profile.title in form
    assert re.findall(r'name="hours" value="(\d+)"', form) == ["1", "2", "4"] and "> 1 hour<" in form
    assert re.findall(r'value="(\w+)" checked', form) == ["small", "1"]


def test_a_title_is_text_and_never_html(server):
    profile = site.Profile("gpu", '<script>alert("1 & 2")</script>', "--nodes=1")
    server.site = replace(server.site, profiles=[profile])
    form = server.options_form(server)
    assert "<script>" not in form and "&lt;script&gt;alert(&#34;1 &amp; 2&#34;)" in form


def test_what_else_a_form_sends_is_left_out(server):
    sent = {"profile": ["ranks"], "hours": ["2"], "options": ["--uid=0"], "cmd": ["id"]}
    server.user_options = server.options_from_form(sent)
    assert server.user_options == {"profile": "ranks", "hours": "2"}
    assert server.chosen() == (server.site.profile("ranks"), 2)


@pytest.mark.parametrize("asked", [{}, {"profile": "", "hours": ""}, {"hours": 1}, {"profile": "small", "hours": "1"}])
def test_who_chooses_nothing_gets_the_first_of_each(asked, server):
    server.user_options = asked
    assert server.chosen() == (server.site.profiles[0], 1)


@pytest.mark.parametrize(
    "asked",
    [
        {"profile": "gpu"},
        {"profile": ["small"]},
        {"profile": {"name": "small"}},
        {"profile": "small --uid=0"},
        {"hours": "3"},
        {"hours": 24},
        {"hours": "1; id"},
        {"hours": "01"},
        {"hours": -1},
        {"hours": True},
        {"hours": [1]},
        {"profile": "small", "hours": "1", "cmd": "id"},
        {"req_sbatch": ["--uid=0"]},
    ],
    ids=str,
)
def test_what_is_not_in_the_lists_is_a_400(asked, server):
    server.user_options = asked
    with pytest.raises(web.HTTPError) as raised:
        server.chosen()
    assert raised.value.status_code == 400 and "from the list" in raised.value.log_message


def test_a_form_with_something_else_in_it_is_a_400_too(server):
    server.user_options = server.options_from_form({"profile": ["<b>"], "hours": ["1"]})
    with pytest.raises(web.HTTPError, match="choose a profile"):
        server.chosen()


def test_the_job_asks_for_what_the_profile_says(server, monkeypatch):
    async def start(self):
        return "node1", 1234

    monkeypatch.setattr(batchspawner.SlurmSpawner, "start", start)
    server.site = replace(server.site, slurm=replace(server.site.slurm, account="class"))
    server.user_options = {"profile": "ranks", "hours": 4}
    assert asyncio.run(server.start()) == ("node1", 1234)
    wanted = ["--partition=course", "--account=class", "--nodes=2", "--ntasks-per-node=2", "--mem=3000"]
    assert (server.req_sbatch, server.req_runtime) == (wanted, "04:00:00")
    words = dict.fromkeys(("homedir", "keepvars", "venv", "published", "data"), "/x") | {"cmd": "the-server"}
    script = batchspawner.format_template(server.batch_script, runtime="04:00:00", sbatch=wanted, **words)
    assert [f"#SBATCH {word}" for word in wanted] == re.findall(r"(?m)^#SBATCH .*$", script)[-5:]
    assert "umask 077" in script and script.rstrip().endswith("the-server")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The script of a learner's job, run by bash: the environment of its server. Slurm's squeue prints what is put there."""
    bin, home = tmp_path / "venv" / "bin", tmp_path / "home"
    write(bin / "squeue", f'#!/bin/sh\ncat "{tmp_path}/squeue"\n')
    (bin / "squeue").chmod(0o755)
    (bin / "python").symlink_to(sys.executable)
    for path in (home, tmp_path / "data", tmp_path / "tmp"):
        path.mkdir()
    release(tmp_path / "published" / "learners", {"hub/pull.py": (ROOT / "hub" / "pull.py").read_text()})
    words = {"homedir": home, "published": tmp_path / "published", "venv": tmp_path / "venv", "data": tmp_path / "data"}
    script = batchspawner.format_template(spawner.JOB, cmd="env -0", keepvars="", runtime="", sbatch=[], **words)

    def run(**variables: str) -> dict[str, str]:
        environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "SLURM_JOB_NAME": "jupyter", "SLURM_JOB_ID": "8"}
        options = {"env": environment | variables, "capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(["bash"], input=script, check=True, **options)
        lines = done.stdout.partition("kept: 0 files\n")[2].split("\0")
        return dict(line.split("=", 1) for line in lines if line)

    return run


def test_lightning_takes_no_learners_kernel_for_a_rank_of_srun(job, tmp_path, monkeypatch):
    write(tmp_path / "squeue", "")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_NAME", "jupyter")
    assert SLURMEnvironment.detect()  # and a Trainer would refuse to start
    monkeypatch.setenv("SLURM_JOB_NAME", job()["SLURM_JOB_NAME"])
    assert not SLURMEnvironment.detect()


def test_a_server_removes_what_a_killed_one_left_and_nothing_of_one_that_runs(job, tmp_path):
    def put() -> None:
        for name in (f"{os.getuid()}-5-aaaaaa", f"{os.getuid()}-7-bbbbbb", f"{os.getuid()}-77-cccccc", "1-5-dddddd"):
            (tmp_path / "tmp" / f"course-server-{name}").mkdir(exist_ok=True)

    def left() -> list[str]:
        return sorted(path.name.split("-")[3] for path in (tmp_path / "tmp").iterdir())

    put()
    write(tmp_path / "squeue", "7\n8\n")
    own = Path(job()["JUPYTER_RUNTIME_DIR"])
    assert own.name.startswith(f"course-server-{os.getuid()}-8-") and not own.exists()  # it has ended
    assert left() == ["5", "7"]  # the other account's, and that of job 7
    put()
    (tmp_path / "squeue").unlink()  # Slurm does not answer
    job()
    assert left() == ["5", "5", "7", "77"]


def test_a_server_that_waited_too_long_says_so_and_why(server, monkeypatch):
    async def start(self):
        self.job_id, self.job_status = "7", "PENDING|n/a|Resources"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.job_status += ", and nobody waits"
            raise

    monkeypatch.setattr(batchspawner.SlurmSpawner, "start", start)
    server.site = replace(server.site, slurm=replace(server.site.slurm, start_minutes=0))
    with pytest.raises(RuntimeError) as raised:
        asyncio.run(server.start())
    told = raised.value.jupyterhub_message
    assert "not there after 0 minutes, so its job was cancelled" in told and "the cluster is full" in told
    assert server.job_status.endswith("nobody waits") and server.job_id == "7"  # JupyterHub now calls stop()


@pytest.mark.parametrize("restarted", ["while it waited", "later"])
def test_a_restarted_hub_cancels_the_job_of_a_server_that_had_not_started(restarted, server, monkeypatch):
    commands = []

    async def submit(self):
        self.job_id = "7"
        return "7"

    async def run_command(command):
        commands.append(command.split()[0])
        return "" if "scancel" in commands else "PENDING|n/a|Priority"

    monkeypatch.setattr(batchspawner.SlurmSpawner, "submit_batch_script", submit)
    before = server
    before.orm_spawner = SimpleNamespace(state=None, server=None)
    asyncio.run(before.submit_batch_script())
    if restarted == "later":
        before.orm_spawner.state = before.get_state()  # as JupyterHub does when start() has returned
    after = spawner.CourseSpawner(site=server.site, exec_prefix="")
    after.load_state(before.orm_spawner.state)
    monkeypatch.setattr(after, "run_command", run_command)
    monkeypatch.setattr(after, "get_req_subvars", dict)
    gone = asyncio.run(after.poll())
    assert (gone, "scancel" in commands) == ((1, True) if restarted == "while it waited" else (None, False))


def test_a_job_that_is_submitted_when_nobody_waits_any_more_is_cancelled(server, monkeypatch):
    """Stop Server is pressed while sbatch still asks Slurm."""
    commands = []

    async def submit(self):
        await asyncio.sleep(0.2)
        return "7"

    async def run_command(command):
        commands.append(command)

    async def start_and_stop():
        starting = asyncio.ensure_future(server.submit_batch_script())
        await asyncio.sleep(0.05)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await server.withdrawal

    monkeypatch.setattr(batchspawner.SlurmSpawner, "submit_batch_script", submit)
    monkeypatch.setattr(server, "run_command", run_command)
    monkeypatch.setattr(server, "get_req_subvars", dict)
    server.exec_prefix = ""
    asyncio.run(start_and_stop())
    assert [command.split() for command in commands] == [["scancel", "7"]]


@pytest.mark.parametrize(
    "answers, asked",
    [
        (["timed out", "timed out", ""], 3),
        (["timed out", "scancel: error: Invalid job id 7"], 2),  # it has ended
        (["timed out"] * 4, 4),
    ],
)
def test_slurm_is_asked_again_to_cancel_a_job(answers, asked, server, monkeypatch):
    left = iter(answers)

    async def stop(self, now=False):
        if error := next(left):
            raise RuntimeError(error)

    monkeypatch.setattr(batchspawner.SlurmSpawner, "stop", stop)
    monkeypatch.setattr(spawner, "AGAIN", (0, 0, 0))
    if asked == 4:
        with pytest.raises(RuntimeError, match="timed out"):
            asyncio.run(server.stop())
    else:
        asyncio.run(server.stop())
    assert len([*left]) == len(answers) - asked


@pytest.mark.parametrize(
    "squeue, told",
    [
        ("CANCELLED|", "its job was ended before it had a node (CANCELLED)."),
        ("FAILED|node1", "its job ended at once. It said: “of this server”."),
        ("", "its job ended at once. It said: “of this server”."),  # Slurm has forgotten it
    ],
)
def test_the_log_of_an_earlier_server_is_not_taken_for_that_of_a_job_that_never_ran(squeue, told, server, monkeypatch):
    async def run_command(command):
        return squeue if "squeue" in command else "a line\nof this server"

    monkeypatch.setattr(server, "run_command", run_command)
    monkeypatch.setattr(server, "get_req_subvars", lambda: {"username": "ada", "homedir": "/home/ada"})
    server.submitted = "7"
    assert asyncio.run(server.why_it_ended()) == told


def test_a_job_that_ends_is_noticed_even_if_slurm_once_gave_no_answer(server, monkeypatch):
    states = iter(["RUNNING|node1|None", "slurm_load_jobs error: timed out", ""])

    async def start(self):
        self.job_id, self.submitted = "7", "7"
        await self.query_job_status()
        await asyncio.sleep(60)

    async def run_command(command):
        if "-t all" in command:
            return "FAILED|node1"
        return "no Lab here" if "tail" in command else next(states)

    monkeypatch.setattr(batchspawner.SlurmSpawner, "start", start)
    monkeypatch.setattr(server, "run_command", run_command)
    monkeypatch.setattr(server, "get_req_subvars", lambda: {"homedir": "/home/ada"})
    server.exec_prefix = ""
    with pytest.raises(RuntimeError, match="ended at once"):
        asyncio.run(asyncio.wait_for(server.start(), 30))


def test_a_question_that_hangs_is_given_up_with_all_its_processes(server, monkeypatch, tmp_path):
    monkeypatch.setattr(spawner, "PATIENCE", 0.5)
    with pytest.raises(RuntimeError, match="no answer"):
        asyncio.run(server.run_command(f"sh -c 'echo $$ >{tmp_path}/pid; sleep 300; true'"))
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_full_home_in_which_no_log_fits_is_named(server, monkeypatch):
    async def run_command(command):
        return "Avail\n0" if " df " in command else ""

    monkeypatch.setattr(server, "run_command", run_command)
    monkeypatch.setattr(server, "get_req_subvars", lambda: {"username": "ada", "homedir": "/home/ada"})
    assert "Your home is full" in asyncio.run(server.last_words())


def test_a_link_starts_no_server(server):
    with pytest.raises(web.HTTPError, match="choose here"):
        server.options_from_query({"profile": ["ranks"], "hours": ["4"]})


@pytest.mark.parametrize(
    "reason, words",
    [
        ("Resources", "the cluster is full"),
        ("ReqNodeNotAvail, UnavailableNodes:node1", "its nodes are down"),
        ("QOSMaxJobsPerUserLimit", "a limit of your account is reached (QOSMaxJobsPerUserLimit)"),
        ("BeginTime", "BeginTime"),
    ],
)
def test_why_a_job_waits_is_told_in_a_learners_words(reason, words, server):
    server.job_id, server.job_status = "7", f"PENDING|n/a|{reason}"
    assert f"Job 7 waits in the queue: {words}" in server.state_in_words()


def test_who_waits_is_told_each_change_until_the_job_runs(server, monkeypatch):
    states = iter([("7", "PENDING|n/a|Priority"), ("7", "PENDING|n/a|Priority"), ("7", "RUNNING|node2|None")])

    async def a_second_passes(_):
        server.job_id, server.job_status = next(states)

    async def read() -> list[str]:
        return [event["message"] async for event in server.progress()]

    monkeypatch.setattr(asyncio, "sleep", a_second_passes)
    asked, waits, runs = asyncio.run(read())
    assert asked.startswith("Asking Slurm") and waits.startswith("Job 7 waits in the queue: the cluster is full")
    assert runs.startswith("Job 7 runs on node2")


def test_a_job_that_slurm_refuses_is_told_to_the_learner(server, monkeypatch):
    async def start(self):
        raise RuntimeError("sbatch: error: invalid partition")

    monkeypatch.setattr(batchspawner.SlurmSpawner, "start", start)
    with pytest.raises(RuntimeError) as raised:
        asyncio.run(server.start())
    assert "invalid partition" in raised.value.jupyterhub_message and "(job none)" in raised.value.jupyterhub_message


@pytest.mark.parametrize(
    "squeue, status",
    [
        ("PENDING|n/a|Priority", JobStatus.PENDING),
        ("RUNNING|node1|None", JobStatus.RUNNING),
        ("SUSPENDED|node1|None", JobStatus.RUNNING),
        ("COMPLETING|node1|None", JobStatus.NOTFOUND),
        ("runuser: user ada does not exist", JobStatus.UNKNOWN),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", JobStatus.UNKNOWN),
        ("squeue: error: Munge encode failed\nslurm_load_jobs error: Invalid credential", JobStatus.UNKNOWN),
        ("slurm_load_jobs error: Invalid job id specified", JobStatus.NOTFOUND),
        ("squeue: error: a warning\nslurm_load_jobs error: Invalid job id specified", JobStatus.NOTFOUND),
        ("", JobStatus.NOTFOUND),
    ],
)
def test_a_server_is_lost_only_if_slurm_says_so(squeue, status, server, monkeypatch):
    async def run_command(command):
        if squeue and "|" not in squeue:
            raise RuntimeError(squeue)
        return squeue

    monkeypatch.setattr(server, "run_command", run_command)
    monkeypatch.setattr(server, "get_req_subvars", lambda: {"username": "ada"})
    server.job_id = "7"
    assert asyncio.run(server.query_job_status()) is status


@pytest.mark.parametrize("state", [one for one in ACTIVE if one not in ("UNKNOWN", "COMPLETING", "STAGE_OUT")])
def test_a_job_that_slurm_has_not_ended_is_a_server_that_is_there(state, server, monkeypatch):
    monkeypatch.setattr(server, "get_req_subvars", dict)
    server.job_id, server.exec_prefix, server.batch_query_cmd = "7", "", f"echo '{state}|node1|None'"
    assert asyncio.run(server.query_job_status()) in (JobStatus.PENDING, JobStatus.RUNNING)


@pytest.mark.parametrize(
    "command, status",
    [
        ("kill -9 $$", JobStatus.UNKNOWN),  # no memory on the hub's machine, say
        ("exit 1", JobStatus.UNKNOWN),
        ("printf '\\377'", JobStatus.UNKNOWN),
        ("echo timeout >&2; exit 1", JobStatus.UNKNOWN),
        ("true", JobStatus.NOTFOUND),  # what squeue prints of a job that has ended
    ],
)
def test_a_question_that_dies_in_silence_is_no_answer(command, status, server, monkeypatch):
    monkeypatch.setattr(server, "get_req_subvars", dict)
    server.job_id, server.exec_prefix, server.batch_query_cmd = "7", "", command
    assert asyncio.run(server.query_job_status()) is status


# ---- the one word that a server may tell the hub ---------------------------------------------------------------------------


def tell(body: bytes, token: str = "right", user: object = None) -> SimpleNamespace:
    """What a learner's server has after somebody told the hub this."""
    server = SimpleNamespace(api_token="right", port=0, cmd=["server"])
    request = SimpleNamespace(
        get_auth_token=lambda: token,
        current_user=user or SimpleNamespace(spawners={"": server}),
        request=SimpleNamespace(body=body),
        set_status=lambda code: None,
    )
    port.PortHandler.post(request)
    return server


def test_only_our_handler_listens():
    assert [one[1] for one in default_handlers if "batchspawner" in one[0]] == [port.PortHandler]


def test_a_server_tells_its_port_and_nothing_else():
    server = tell(b'{"port": 40000, "cmd": ["id"]}')
    assert (server.port, server.cmd) == (40000, ["server"])


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'"port"', *(b'{"port": %s}' % p for p in (b"22", b"65536", b"true", b'"4000"'))]
)
def test_what_is_no_port_is_a_400(body):
    with pytest.raises(web.HTTPError) as raised:
        tell(body)
    assert raised.value.status_code == 400


@pytest.mark.parametrize("token, user", [("another", None), ("", None), (None, None), ("right", SimpleNamespace())])
def test_who_is_not_that_server_is_a_403(token, user):
    with pytest.raises(web.HTTPError) as raised:
        tell(b'{"port": 40000}', token, user)
    assert raised.value.status_code == 403
