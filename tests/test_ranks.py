"""Ranks inside a notebook, all of them real: one world, failures that name their rank, and nothing left behind."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager, redirect_stdout

import nbformat
import papermill
import psutil
import pytest
from helpers import wait_until
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from jupyter_client.manager import start_new_kernel

from course_lib import ports, ranks
from course_lib.config import UserError
from course_lib.failures import first_failure
from course_lib.kernel import FileKernel
from course_lib.launch import GUARD
from course_lib.processes import kill_tree
from course_lib.ranks import RanksError

IMPORTS = """
import os, sys, time
import torch, torch.distributed as dist
from course_lib import world
from course_lib.config import Config
"""
JOIN = 'here = world.start(Config(launcher="mpi", device="cpu", timeout=%d))\n'
# Starts ranks, tells the processes below it, and ends in one way or another when it is told to.
STARTER = """
import sys, psutil
from course_lib import ranks
team = ranks.start(2)
print("below:", *[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
sys.stdin.readline()
"""
ENDINGS = {"killed": "", "ends": "", "raises": "1 / 0", "exits": "sys.exit(RuntimeError('enough'))"}
INSIDE_A_JOB = {
    "SLURM_JOB_ID": "42",
    "SLURM_NTASKS": "1",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_MEM_PER_CPU": "100",
    "SBATCH_PARTITION": "debug",
    "PMI_RANK": "0",
    "PMI_SIZE": "1",
    "SLURM_CONF": "/kept/slurm.conf",
}
STRANGERS: set[int] = set()  # below this process since before these tests, such as multiprocessing's own helpers
pytestmark = pytest.mark.usefixtures("alone")


# ---- what the tests need ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def strangers() -> None:
    STRANGERS.update(below())


@pytest.fixture(scope="module")
def shell() -> Iterable[InteractiveShell]:
    """A notebook's shell in this process."""
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


@pytest.fixture(scope="module")
def shared(shell) -> Iterable[ranks.Ranks]:
    """Two ranks that have joined, started inside a Slurm job; a later ranks.start ends them, so their tests come first."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in INSIDE_A_JOB.items():
            patch.setenv(name, value)
        team = ranks.start(2)
    with team:
        team.run(IMPORTS)  # all of them, or one would wait for the other's and not for long
        team.run(JOIN % 3)
        yield team


@pytest.fixture
def px(shell, shared) -> Callable:
    """Run a %%px cell: what it printed (also to stderr) and displayed."""

    def run(line: str, cell: str):
        with capture_output() as captured:
            shell.run_cell_magic("px", line, cell)
        return captured

    return run


def is_running(pid: int) -> bool:
    """A zombie is not: only its number is left, until its parent asks."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def below(pid: int | None = None) -> set[int]:
    """All that a process (this one) has started, and they in turn."""
    return {child.pid for child in psutil.Process(pid).children(recursive=True) if is_running(child.pid)} - STRANGERS


def wait_until_gone(pids: Iterable[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), seconds=60)


@contextmanager
def nothing_left():
    """What is started inside is gone at the end, at once."""
    before = below()
    yield
    assert below() <= before


@contextmanager
def as_soon_as(condition: Callable[[], bool], act: Callable[[], object]):
    """Do something when something comes true, beside what goes on here."""
    thread = threading.Thread(target=lambda: (wait_until(condition), act()))
    thread.start()
    yield
    thread.join()


def interrupt() -> None:
    """What the stop button does."""
    os.kill(os.getpid(), signal.SIGINT)


# ---- a team of ranks -------------------------------------------------------------------------------------------------------


def test_engine_number_is_mpi_rank_is_torch_rank(shared):
    assert shared.client.ids == [0, 1]
    assert shared["mpi_rank"] == [0, 1]  # ipyparallel's own, from the communicator
    shared.run("ranks, size, threads = (dist.get_rank(), here.rank), dist.get_world_size(), torch.get_num_threads()")
    assert shared["ranks"] == [(0, 0), (1, 1)]
    assert shared["size"] == [2, 2]
    assert shared["threads"] == [1, 1]
    shared.run("total = torch.tensor([1.0 + here.rank]); dist.all_reduce(total); total = total.item()")
    assert shared["total"] == [3.0, 3.0]


def test_inside_a_slurm_job_the_ranks_know_nothing_of_it(shared):
    """Their world of two is proved above; PMI_* is here what their own mpiexec has set."""
    shared.run("found = {name: value for name, value in os.environ.items() if name.startswith(('SLURM', 'SBATCH'))}")
    assert shared["found"] == [{"SLURM_CONF": "/kept/slurm.conf"}] * 2
    shared.run("found = os.environ['PMI_SIZE'], os.environ['PMI_RANK'], os.environ['OMP_NUM_THREADS']")
    assert shared["found"] == [("2", "0", "1"), ("2", "1", "1")]


def test_the_world_can_be_joined_again(shared):
    """A cell that is run once more; the group stays the same."""
    shared.run("before = dist.group.WORLD")
    for _ in range(5):
        shared.run(JOIN % 3, timeout=60)
    shared.run("same = dist.group.WORLD is before, here.world_size")
    assert shared["same"] == [(True, 2)] * 2


def test_output_is_labelled_and_in_the_order_of_ranks(px):
    shown = px("", "time.sleep(0.3 * (1 - here.rank))\nprint('first')\nprint('second', here.rank)\n10 + here.rank")
    lines = [line for rank in (0, 1) for line in ("first", f"second {rank}", str(10 + rank))]
    assert shown.stdout.splitlines() == [f"[rank {number // 3}] {line}" for number, line in enumerate(lines)]
    shown = px("", "print('oh', file=sys.stderr)")
    assert (shown.stdout, shown.stderr) == ("", "[rank 0] oh\n[rank 1] oh\n")


def test_rich_displays_stay_rich(px):
    shown = px("", "from IPython.display import HTML, display\ndisplay(HTML(f'<b>{here.rank}</b>'))")
    assert shown.stdout.splitlines() == ["[rank 0]", "[rank 1]"]
    assert [output.data["text/html"] for output in shown.outputs] == ["<b>0</b>", "<b>1</b>"]


def test_some_ranks_only(px, shared):
    assert px("--targets 1", "print(here.rank)").stdout == "[rank 1] 1\n"
    assert px("-t 1,0 --timeout 60", "print(here.rank)").stdout == "[rank 1] 1\n[rank 0] 0\n"


def test_on_all_ranks_and_here(px, shared, shell):
    px("--local", "where = 1")
    assert shared["where"] == [1, 1] and shell.user_ns["where"] == 1
    with pytest.raises(ZeroDivisionError):
        px("--local", "1 / ('here' in globals())")  # the ranks have joined a world, the notebook has not


@pytest.mark.parametrize("line", ["--targets 2", "--targets x", "--targets", "--timeout soon", "--nonsense", "word"])
def test_a_wrong_option_is_one_line(px, line):
    with pytest.raises(UserError, match="^%%px") as complaint:
        px(line, "print('never')")
    assert len(str(complaint.value).splitlines()) == 1


def test_fewer_ranks_than_one_are_refused(shared):
    with pytest.raises(UserError, match="at least one rank"):
        ranks.Ranks(0)


def test_a_variable_goes_to_all_ranks_and_back(shared):
    shared["given"] = {"a": [1, 2]}
    assert shared["given"] == [{"a": [1, 2]}] * 2


def test_an_interrupted_cell_leaves_the_ranks_whole(shared, tmp_path):
    with as_soon_as((tmp_path / "1").exists, interrupt), pytest.raises(KeyboardInterrupt):
        shared.run(f"open(f'{tmp_path}/{{here.rank}}', 'w'); time.sleep(600)")
    shared.run("total = torch.ones(1); dist.all_reduce(total); total = total.item()")
    assert shared["total"] == [2.0, 2.0]


# ---- failures: the first rank is named, in its own words -------------------------------------------------------------------


def test_a_rank_that_raises_is_named_and_what_the_others_printed_is_shown(px, shared):
    with capture_output() as shown, pytest.raises(RanksError, match="^rank 1 raised ZeroDivisionError: ") as failed:
        shared.run("print('here')\nif here.rank == 1:\n    1 / 0")
    assert "Traceback" in failed.value.details and "ZeroDivisionError" in failed.value.details
    assert failed.value._render_traceback_()[-1] == f"RanksError: {failed.value}"
    assert shown.stdout == "[rank 0] here\n[rank 1] here\n"
    assert px("", "print('well')").stdout == "[rank 0] well\n[rank 1] well\n"


def test_one_that_raises_while_the_other_waits_for_it(px):
    """No hang: the other gives up after the group's time-out, 3 s here. From then on the ranks have lost each other."""
    with pytest.raises(RanksError, match=r"^rank 1 raised ZeroDivisionError: .*then rank 0: RuntimeError") as failed:
        px("", "if here.rank == 1:\n    1 / 0\ndist.all_reduce(torch.ones(1))")
    assert "ZeroDivisionError" in failed.value.details
    with pytest.raises(RanksError, match=r"start them again with ranks\.start\(2\)"):
        px("", "dist.all_reduce(torch.ones(1))")


def test_a_new_start_ends_the_ranks_of_before_and_a_killed_rank_is_named(shared, tmp_path):
    before = below()
    assert set(shared.pids) < before
    team = ranks.start(2)
    assert not any(map(is_running, before))
    with pytest.raises(RanksError, match="^the ranks were stopped: start them again"):
        shared.run("pass")
    with (
        as_soon_as((tmp_path / "0").exists, lambda: os.kill(team.pids[1], signal.SIGKILL)),
        pytest.raises(RanksError, match=r"^rank 1 was killed by signal 9.*again with ranks\.start\(2\)$"),
    ):
        team.run(f"import time; open(f'{tmp_path}/{{mpi_rank}}', 'w'); time.sleep(600)")
    assert below() == set()  # not even what rank 0 was
    for call in (lambda: team.run("pass"), lambda: team["x"], lambda: team.__setitem__("x", 1)):
        with pytest.raises(RanksError, match="^rank 1 was killed by signal 9.*start them again"):
            call()


def test_after_that_ranks_start_anew_and_one_that_freezes_is_noticed():
    """By the heartbeat, while the other would work on for minutes."""
    with ranks.start(2) as team:
        assert team["mpi_size"] == [2, 2]
        os.kill(team.pids[1], signal.SIGSTOP)
        with pytest.raises(RanksError, match=r"^rank 1 does not answer any more.*again with ranks\.start\(2\)$"):
            team.run("import time; time.sleep(600)")
        assert below() == set()


def test_an_idle_rank_that_dies_and_one_that_takes_too_long(px):
    with ranks.start(1) as team:
        team.run("import os, time")
        with pytest.raises(RanksError, match="^rank 0 has not finished in 0.5 s; all were stopped"):
            px("--timeout 0.5", "time.sleep(600)")
        assert below() == set()
    with ranks.start(1) as team:
        os.kill(team.pids[0], signal.SIGTERM)
        wait_until(lambda: not team.client.ids)
        with pytest.raises(RanksError, match=r"^rank 0 .*start them again with ranks\.start\(1\)$"):
            team.run("pass")


def test_every_team_has_ports_of_its_own(monkeypatch):
    """Also where somebody else has taken one in the middle of a block."""
    monkeypatch.setattr(ports, "PORTS", range(19_000, 19_075, 25))
    with socket.create_server(("", 19_030)), ports.claim_ports() as one, ports.claim_ports() as two:
        assert {claim.getsockname()[1] for claim in (one, two)} == {19_000, 19_050}
        with pytest.raises(UserError, match="^no 25 free ports in a row between 19000 and 19075 on this machine$"):
            ports.claim_ports()


# ---- nothing outlives its notebook -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def starters() -> Iterable[dict[str, psutil.Popen]]:
    """Programs that have started ranks and never stop them, all at the same time."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = {
        ending: psutil.Popen([sys.executable, "-c", STARTER + last], **pipes) for ending, last in ENDINGS.items()
    }
    yield started
    kill_tree(list(started.values()))
    for process in started.values():
        process.communicate()


@pytest.mark.parametrize(("ending", "code"), [("killed", -signal.SIGKILL), ("ends", 0), ("raises", 1), ("exits", 1)])
def test_ranks_end_with_the_program_that_started_them(starters, ending, code):
    process = starters[ending]
    said = []
    while not (said and "below: " in said[-1]):
        said.append(process.stdout.readline())
        assert said[-1], "".join(said)
    pids = [int(word) for word in said[-1].partition("below: ")[2].split()]
    assert len(pids) > 4 and all(map(is_running, pids))
    if ending == "killed":
        process.kill()
    else:
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait(60) == code
    wait_until_gone(pids)


def test_a_notebook_run_twice_by_papermill(tmp_path):
    cells = [
        "from course_lib import ranks\nteam = ranks.start(2)",
        f"%%px{IMPORTS}{JOIN % 60}x = torch.tensor([1.0 + here.rank])\ndist.all_reduce(x)\nprint(x)",
        "team['x']",
    ]
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(notebook, tmp_path / "in.ipynb")
    for _ in range(2):
        before = below()
        files = {"input_path": tmp_path / "in.ipynb", "output_path": tmp_path / "out.ipynb", "cwd": tmp_path}
        papermill.execute_notebook(**files, kernel_manager_class=FileKernel, progress_bar=False)
        wait_until_gone(below() - before)
        outputs = [cell.outputs for cell in nbformat.read(tmp_path / "out.ipynb", as_version=4).cells]
        assert [output.text for output in outputs[0]] == ["starting 2 ranks\n"]
        assert "".join(output.text for output in outputs[1]) == "[rank 0] tensor([3.])\n[rank 1] tensor([3.])\n"
        assert outputs[2][0].data["text/plain"] == "[tensor([3.]), tensor([3.])]"
    assert {path.name for path in tmp_path.iterdir()} == {"in.ipynb", "out.ipynb"}


def test_ranks_end_when_their_kernel_is_restarted():
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        for now in (True, False):
            outputs = []
            client.execute_interactive("from course_lib import ranks; team = ranks.start(2)", timeout=120)
            client.execute_interactive("%%px\n1 / 0", timeout=60, output_hook=outputs.append)
            [error] = [message["content"]["traceback"] for message in outputs if message["msg_type"] == "error"]
            assert "Traceback" in "".join(error[:3]) and error[-1].startswith("RanksError: rank ")
            pids = below(manager.provisioner.pid)
            assert len(pids) > 4
            manager.restart_kernel(now=now)
            wait_until_gone(pids)
            client.wait_for_ready(timeout=60)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


# ---- whole training runs by torchrun ---------------------------------------------------------------------------------------


@pytest.fixture
def endless(config):
    """Under way until somebody ends it."""
    return config.replace(strategy="ddp", epochs=10**6)


def has_steps(config) -> bool:
    log = config.run / "metrics.jsonl"
    return log.exists() and log.read_text().count('"step"') > 3


def kill_rank(number: int) -> None:
    ranks.find_ranks("course_lib.train")[number].kill()


def test_torchrun_trains_and_tags_its_output(config, capsys):
    config = config.replace(strategy="ddp", max_steps=3)
    with nothing_left():
        assert ranks.torchrun(2, config) == config.run
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == [f"[rank 0] step {step}/3" for step in (1, 2, 3)]
    assert lines[-1].startswith(f"[rank 0] done: {config.run}")
    assert (config.run / "checkpoint.pt").exists()


def test_a_users_mistake_is_told_with_its_rank(config, capsys):
    with nothing_left(), pytest.raises(RanksError, match=r"^rank [01] ended with exit code 2: error: --batch 40 on 2 "):
        ranks.torchrun(2, config.replace(strategy="ddp", batch=40))
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line[: line.index("--batch")] for line in lines] == ["[rank 0] error: ", "[rank 1] error: "]


def test_a_traceback_is_that_of_the_rank_that_failed(config):
    """Rank 1 can't write its timeline; rank 0 waits for it, loses the connection, and is not to blame."""
    config = config.replace(strategy="ddp", epochs=20, max_steps=100, timeline=1)
    block = (config.run / "timeline.1.json").mkdir
    with nothing_left(), as_soon_as(lambda: has_steps(config), block), pytest.raises(RanksError) as failed:
        ranks.torchrun(2, config, quiet=True)
    assert str(failed.value).startswith("rank 1 ended with exit code 1: IsADirectoryError: ")
    lines = failed.value.details.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "timeline.save" in failed.value.details
    assert lines[-1].startswith("IsADirectoryError: ")


def test_a_killed_rank_of_a_training_run_is_named(endless):
    with (
        nothing_left(),
        as_soon_as(lambda: has_steps(endless), lambda: kill_rank(1)),
        pytest.raises(RanksError, match="^rank 1 was killed by signal 9$"),
    ):
        ranks.torchrun(2, endless, quiet=True)


def test_an_interrupted_training_run_leaves_no_process(endless):
    """That its lines are seen shows that they are streamed: this run never ends."""
    with (
        nothing_left(),
        redirect_stdout(io.StringIO()) as out,
        as_soon_as(lambda: "[rank 0] step 3/" in out.getvalue(), interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        ranks.torchrun(2, endless)


def test_who_lost_the_others_is_not_to_blame():
    """Both are seen dead at the same moment, and torchrun takes the first of them for the cause."""
    lines = [
        "[rank 1] [rank1]: Traceback (most recent call last):",
        "[rank 0] [rank0]: Traceback (most recent call last):",
        "[rank 0] step 2/9  loss 0.4",
        "[rank 1] [rank1]: ValueError: mine",
        "[rank 0] [rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        "Failures:",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : 1 (pid: 12)",
        "Root Cause (first observed failure):",
        "  rank      : 0 (local_rank: 0)",
        "  exitcode  : 1 (pid: 11)",
    ]
    failed = first_failure(lines, 1)
    assert str(failed) == "rank 1 ended with exit code 1: ValueError: mine"
    assert failed.details == "Traceback (most recent call last):\nValueError: mine"
    others = lines[1:3] + lines[4:]
    killed = [line.replace("exitcode  : 1 (pid: 12)", "exitcode  : -9 (pid: 12)") for line in others]
    assert str(first_failure(killed, 1)) == "rank 1 was killed by signal 9"
    stopped = [line.replace("exitcode  : 1 (pid: 12)", "exitcode  : -15 (pid: 12)") for line in others]
    assert str(first_failure(stopped, 1)).startswith("rank 0 ended with exit code 1: RuntimeError: ")
    assert str(first_failure(["no such file"], 7)) == "torchrun ended with exit code 7"


# ---- the guard -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 7])
def test_the_guard_passes_the_exit_code_on(code):
    assert subprocess.run([*GUARD, sys.executable, "-c", f"raise SystemExit({code})"], check=False).returncode == code


def test_the_guard_hides_the_job(monkeypatch):
    for name, value in INSIDE_A_JOB.items():
        monkeypatch.setenv(name, value)
    found = subprocess.run([*GUARD, "env"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line for line in found if line.split("=")[0] in INSIDE_A_JOB] == ["SLURM_CONF=/kept/slurm.conf"]


def test_the_guard_ends_its_program_on_a_signal(tmp_path):
    """With what the program has started, even in a session of its own."""
    program = ["sh", "-c", "setsid sleep 600 & echo $! && wait"]
    guard = psutil.Popen([*GUARD, *program], stdout=subprocess.PIPE, text=True)
    pids = [int(guard.stdout.readline()), *below(guard.pid)]
    assert all(map(is_running, pids))
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(60) == 128 + signal.SIGTERM
    wait_until_gone(pids)


def test_a_signal_while_the_guard_starts_its_program_leaves_nothing():
    early = """
import os, signal, sys, psutil
from course_lib import guard
def start(*words, real=psutil.Popen, **options):
    program = real(*words, **options)
    print(program.pid, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    return program
psutil.Popen = start
sys.exit(guard.main())
"""
    command = [sys.executable, "-c", early, str(os.getpid()), "sleep", "600"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert not is_running(int(done.stdout))


def test_the_guard_ends_its_program_with_the_parent():
    program = "import os, subprocess, sys; subprocess.run([sys.executable, '-m', 'course_lib.guard', str(os.getpid()), "
    parent = psutil.Popen([sys.executable, "-c", program + "'sleep', '600'])"])
    wait_until(lambda: len(below(parent.pid)) == 2)
    pids = below(parent.pid)
    parent.kill()
    parent.wait()
    wait_until_gone(pids)
