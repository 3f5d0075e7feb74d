"""Jobs from a notebook, on a real Slurm and without one: submitted once, watched, collected, and why they failed."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from helpers import BIN, ROOT, ask, assert_same, result, use_no_slurm, use_slurm, wait_until
from jupyter_client.manager import start_new_kernel

from course_lib import cockpit, jobs, scheduler
from course_lib.config import FIELDS, Config, UserError
from course_lib.failures import why
from course_lib.jobs import Job, JobError, submit
from course_lib.metrics import read_log
from course_lib.scheduler import Status

ENDLESS = {"epochs": 10**6}  # until somebody ends it
RANKS = {"01_baseline": 1, "02_data": 1, "03_data_parallel": 1, "04_ddp": 4, "05_launch": 2}
RANKS |= {"07_model_parallel": 2, "08_sharding": 2, "09_mpi": 2} | ({"10_horovod": 2} if find_spec("horovod") else {})
RANKS |= {"11_lightning": 2, "12_rnn_digits": 2, "13_bert_squad": 2}
WIDGET = "application/vnd.jupyter.widget-view+json"
pytestmark = pytest.mark.usefixtures("alone")


# ---- what the tests need ---------------------------------------------------------------------------------------------------


@pytest.fixture
def silent(cluster, monkeypatch, tmp_path) -> None:
    """Slurm's programs talk to a port at which nobody listens, and give up soon."""
    known = (cluster / "slurm.conf").read_text()
    conf = tmp_path / "slurm.conf"
    conf.write_text(re.sub(r"(?m)^SlurmctldPort=.*", "SlurmctldPort=1\nMessageTimeout=1", known))
    use_slurm(monkeypatch, conf)


@pytest.fixture(scope="module")
def small(base) -> dict:
    """The smallest training, in submit's words; where it is kept comes later."""
    config = base.replace(timeout=240)
    return {name: value for name, value in vars(config).items() if value != FIELDS[name].default and name != "runs"}


@pytest.fixture(scope="module")
def on_slurm(cluster, small, tmp_path_factory) -> Iterator[dict[str, Job]]:
    """Jobs at the same time: one that ends well, and others that fail, each in its own way."""
    asked = small | {"runs": str(tmp_path_factory.mktemp("slurm"))}
    broken = Path(asked["runs"]) / "broken"
    broken.mkdir()
    (broken / "timeline.1.json").symlink_to(broken / "nowhere" / "at all")  # so rank 1 can't write it
    one = {"cpus_per_task": 1}
    with pytest.MonkeyPatch.context() as patch:
        use_slurm(patch, cluster / "slurm.conf")
        patch.setenv("COURSE_PLAIN", "1")
        patch.setenv("MAX_RESTARTS", "0")  # of torchrun: what fails here would fail again
        late = submit("01_baseline", time=1, checkpoint_every=1, **one, **ENDLESS, **asked)
        wait_until(lambda: has_steps(late), every=0.1)  # first: the others' start would take most of its minute
        found = {
            "late": late,
            "ddp": submit("04_ddp", max_steps=6, **asked),
            "mistake": submit("01_baseline", train_years="1870", **one, **asked),
            "broken": submit("04_ddp", max_steps=3, timeline=1, name="broken", **one, **asked),
            "killed": submit("05_launch", ntasks_per_node=1, **ENDLESS, **asked),
            "held": submit("01_baseline", hold=True, seed=7, **one, **asked),
        }
    yield found
    with pytest.MonkeyPatch.context() as patch:
        use_slurm(patch, cluster / "slurm.conf")
        for job in found.values():
            job.cancel()


@pytest.fixture(scope="module")
def here(path_without, small, case_studies, tmp_path_factory) -> Iterator[dict[str, Job]]:
    """Every lesson's script without Slurm."""
    folder = tmp_path_factory.mktemp("here")
    venv = folder / "venv"  # the real one is large, and 02_data copies it
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(f'#!/bin/sh\nexec "{BIN}/python" "$@"\n')
    (venv / "bin" / "python").chmod(0o755)
    (folder / "tmp").mkdir()
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        use_no_slurm(patch, path_without)
        patch.setenv("COURSE_PLAIN", "1")
        for script in RANKS:
            asked = small | {"runs": str(folder), "max_steps": 6} | case_studies.get(script, {})
            asked |= {"nodes": 1} if RANKS[script] == 2 and script != "07_model_parallel" else {}  # others as they are
            with patch.context() as more:
                if script == "02_data":
                    staged = {"DATA": asked.pop("data"), "VENV": str(venv), "TMPDIR": str(folder / "tmp")}
                    for name, value in staged.items():
                        more.setenv(name, value)
                found[script] = submit(script, **asked)
            for job in list(found.values())[:-1][-1:]:  # two at the same time
                job.wait()
    yield found
    for job in found.values():
        job.cancel()


def numbers(folder: Path) -> set[str]:
    """All jobs that a Slurm has ever had."""
    return set(re.findall(r"JobId=(\d+)", ask(folder, "scontrol", "--oneliner", "show", "job")))


def has_steps(job: Job) -> bool:
    return any(event["step"] > 3 for event in job._events())


def find_rank(job: Job, number: int) -> psutil.Process:
    """The process of a job that is this rank, on this machine as everything is."""
    for process in psutil.process_iter(["name", "cmdline", "environ"]):
        words, variables = process.info["cmdline"] or [], process.info["environ"] or {}
        is_its = {f"--runs={Path(job.run).parent}", f"--name={Path(job.run).name}"} <= set(words)
        is_python = (process.info["name"] or "").startswith("python")
        if is_its and is_python and variables.get("SLURM_PROCID") == str(number):
            return process
    raise LookupError(f"{job} has no rank {number}")


def below(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def wait_until_gone(left: Iterable[psutil.Process]) -> None:
    """A zombie is gone: only its number is left, until its parent asks."""
    wait_until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left), seconds=60)


def content(job: Job) -> dict:
    """What its checkpoint and its log hold."""
    return result(Config(runs=str(Path(job.run).parent), name=Path(job.run).name))


def ask_for(job: Job, **changes) -> Job:
    """The call that made a job, once more."""
    return submit(job.script, **job.asked | changes)


# ---- on two real nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_running_job_tells_its_step_and_where_it_runs(slurm, on_slurm):
    job = on_slurm["late"]
    wait_until(lambda: has_steps(job), every=0.1)
    status = job.status()
    assert (status.state, status.nodes, status.limit, status.ranks) == ("RUNNING", "node1", "00:01:00", 1)
    assert status.steps == 12 * 10**6  # 50 samples in batches of 4
    assert re.fullmatch(rf"running on node1 after 00:\d\d:\d\d, step {status.step} of 12000000", str(status))
    find_rank(job, 0).send_signal(signal.SIGSTOP)  # it has been seen, and shall sleep until its time is up: see below


@pytest.mark.integration
def test_a_killed_rank_is_named(slurm, on_slurm):
    """So early because it computes until then."""
    job = on_slurm["killed"]
    wait_until(lambda: has_steps(job), every=0.1)
    find_rank(job, 1).kill()
    with pytest.raises(JobError, match=r"failed at step \d+ of \d+: rank 1 .*killed$"):
        job.result()


@pytest.mark.integration
def test_a_result_is_what_the_run_has_measured_on_all_its_ranks(slurm, on_slurm, capsys):
    job = on_slurm["ddp"]
    measured = job.result()
    *_, evaluated, end = read_log(job.run)
    assert measured["loss"] == evaluated["loss"] and measured["rmse"] == evaluated["rmse"]
    assert (measured["ranks"], measured["nodes"], measured["step"]) == (4, "node[1-2]", 6)
    assert re.fullmatch(r"00:\d\d:\d\d", measured["elapsed"])
    assert measured["max_rss_mb"] == end["max_rss_mb"] > 50  # no Python with torch is smaller
    assert "done: " in job.log() and f"validation loss {measured['loss']:.4f}" in job.log()
    assert str(job) in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.integration
def test_the_job_is_written_down_and_the_same_call_attaches_to_it(slurm, on_slurm, capsys):
    job, before = on_slurm["late"], numbers(slurm)
    known = json.loads((Path(job.run).parent / "jobs" / f"{job.key}.json").read_text())
    assert known == vars(job) and str(known["number"]) in before
    assert f"Comment={job.key}" in ask(slurm, "scontrol", "show", "job", str(job.number))
    backwards = dict(reversed(job.asked.items()))
    assert submit(job.script, hold=False, **backwards) == job  # neither the order counts, nor what is not wanted
    assert "attached" in capsys.readouterr().out
    assert numbers(slurm) == before


@pytest.mark.integration
def test_again_is_a_new_job_in_a_folder_of_its_own_and_another_question_another_job(slurm, on_slurm, capsys):
    first = ask_for(on_slurm["ddp"], hold=True, nodes=np.int64(2))  # as a table's numbers are
    try:
        assert first.key != on_slurm["ddp"].key
        second = ask_for(first, again=True)
        assert (second.key, second.attempt) == (first.key, 2)
        assert len({job.number for job in (first, second)} | {on_slurm["ddp"].number}) == 3
        assert len({job.run for job in (first, second, on_slurm["ddp"])}) == 3 and first.log_file != second.log_file
        assert ask_for(first).number == second.number
    finally:
        first.cancel()
        second.cancel()


@pytest.mark.integration
@pytest.mark.parametrize(("option", "reason"), [({"hold": True}, "JobHeldUser"), ({"begin": "now+1hour"}, "BeginTime")])
def test_a_pending_job_says_why_and_a_cancelled_one_that_it_was(slurm, on_slurm, option, reason):
    job = ask_for(on_slurm["ddp"], seed=1, **option)
    wait_until(lambda: job.status().reason == reason, every=0.2)
    assert str(job.status()) == f"pending ({reason})" and not job.status().finished
    job.cancel()
    with pytest.raises(JobError, match=rf"^{re.escape(str(job))} was cancelled; again=True submits it anew$"):
        job.result()
    job.cancel()  # twice is once


@pytest.mark.integration
def test_a_job_that_slurm_has_forgotten_is_submitted_anew(slurm, on_slurm):
    """Numbers begin anew on another cluster: that there is a job with this number does not make it this one."""
    job = ask_for(on_slurm["ddp"], hold=True, nice=1)
    try:
        for number in (1, on_slurm["ddp"].number):
            lost = dataclasses.replace(job, number=number)
            assert lost.status() == Status("LOST") and str(lost.status()) == "lost"
            with pytest.raises(JobError, match=r"ended as LOST; again=True"):
                lost.result()
        jobs._write(Path(job.run).parent / "jobs" / f"{job.key}.json", vars(lost))
        anew = ask_for(job)
        anew.cancel()
        assert anew.number not in (job.number, lost.number) and anew.attempt == 2
    finally:
        job.cancel()
    done = dataclasses.replace(on_slurm["ddp"], number=1)  # of a run that has come to its end the log tells enough
    assert done.result()["loss"] == on_slurm["ddp"].result()["loss"]


@pytest.mark.integration
def test_who_uses_a_folder_again_does_not_inherit_its_result(slurm, on_slurm, tmp_path):
    on_slurm["ddp"].wait()
    later = dataclasses.replace(on_slurm["ddp"], number=1, submitted=time.time(), log_file=str(tmp_path / "later.log"))
    assert later.status() == Status("LOST")


@pytest.mark.integration
def test_a_job_that_can_never_start_says_so(slurm, on_slurm, small, tmp_path):
    """It waits for one that has failed; without a word `result()` would wait for ever."""
    on_slurm["mistake"].wait()
    job = submit("01_baseline", dependency=f"afterok:{on_slurm['mistake'].number}", **small, runs=str(tmp_path))
    try:
        with pytest.raises(JobError, match=r"can never start \(DependencyNeverSatisfied\): cancel\(\) it"):
            job.result()
    finally:
        job.cancel()
    wait_until(lambda: job.status().state == "CANCELLED", every=0.2)


@pytest.mark.integration
def test_a_failed_job_that_slurm_has_forgotten_is_still_a_failed_one(slurm, on_slurm):
    """Or Run All would submit it again, days later."""
    on_slurm["mistake"].wait()
    assert dataclasses.replace(on_slurm["mistake"], number=1).status().state == "FAILED"


# ---- why it failed ---------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_users_mistake_is_that_one_line(slurm, on_slurm):
    with pytest.raises(JobError) as failed:
        on_slurm["mistake"].result()
    assert str(failed.value).startswith(f"{on_slurm['mistake']} failed: ") and "1870" in str(failed.value)
    assert len(str(failed.value).splitlines()) == 1 and not failed.value.details
    assert failed.value._render_traceback_() == [f"JobError: {failed.value}"]


@pytest.mark.integration
def test_a_rank_that_raises_is_named_in_its_own_words(slurm, on_slurm):
    with pytest.raises(JobError, match=r"failed at step 3 of 3: rank 1 .*FileNotFoundError: ") as failed:
        on_slurm["broken"].result()
    assert failed.value.details.startswith("Traceback") and "timeline.save" in failed.value.details


KILLED_FOR_MEMORY = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."
)
CAUSES = {
    "memory": (Status("OUT_OF_MEMORY"), "", "needed more memory than it had: ask for more with mem= or mem_per_cpu="),
    "memory, said by slurmstepd alone": (
        Status("FAILED", step=3, steps=9),
        KILLED_FOR_MEMORY,
        "more memory .* at step 3 of 9: ",
    ),
    "memory, without cgroups": (Status("FAILED"), "slurmstepd: error: Step 7.0 exceeded memory limit", "more memory"),
    "time": (Status("TIMEOUT", limit="01:00:00"), "", "over its time limit of 01:00:00: ask for more with time=$"),
    "the node": (Status("NODE_FAIL"), "gone\n", "ended as NODE_FAIL; again=True submits it anew"),
    "nothing to be seen": (Status("FAILED"), "", "failed: it ended with exit code"),
    "torchrun": (
        Status("FAILED"),
        "  rank      : 2 (local_rank: 0)\n  exitcode  : -9 (pid: 7)",
        "rank 2 was killed by",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_causes_that_can_not_be_had_here(cause, tmp_path):
    """No cgroups, no broken nodes: these are a status and a log as Slurm would leave them."""
    status, log, expected = CAUSES[cause]
    (tmp_path / "log").write_text(f"step 1/9\n{log}\n")
    job = Job("04_ddp", {}, 7, "key", True, 1, 0.0, str(tmp_path / "run"), str(tmp_path / "log"))
    error = why(job, status)
    assert re.search(expected, str(error)) and str(error).startswith("job 7 (04_ddp) ")
    assert len(str(error).splitlines()) == 1


# ---- without Slurm: the same call, the same result -------------------------------------------------------------------------


def test_every_lessons_job_runs_here_with_as_many_ranks_as_on_a_cluster(no_slurm, here):
    assert {path.stem for path in (ROOT / "slurm").glob("[0-9]*.sbatch")} == set(RANKS)
    results = {script: job.result() for script, job in here.items()}
    assert {script: measured["ranks"] for script, measured in results.items()} == RANKS
    for script, job in here.items():
        assert job.log().count("done: ") == 1
        assert (results[script]["nodes"], results[script]["step"]) == ("this machine", 6)
        assert re.fullmatch(r"00:\d\d:\d\d", results[script]["elapsed"]) and results[script]["max_rss_mb"] > 50
    staged = Path(read_log(here["02_data"].run)[0]["config"]["data"])
    assert staged.parent.name.startswith("course-") and not staged.parent.exists()  # copied, read, and cleaned up


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["0 of 6", "1 of 6", "2 of 6", "3 of 6", "4 of 6", "5 of 6"]),
        (["--nodes=1", "--time=1", "--hold"], ["0 of 2", "1 of 2"]),
        (["--ntasks-per-node=1"], ["0 of 3", "1 of 3", "2 of 3"]),
        (["--ntasks=1"], ["0 of 1"]),
    ],
)
def test_as_many_tasks_as_the_script_says_unless_an_option_says_otherwise(options, expected, tmp_path):
    head = "#!/bin/bash\n#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=2   # ranks\n"
    line = 'srun --label bash -c \'echo "$SLURM_PROCID of $SLURM_NTASKS"; exit $1\' - "$1"\n'
    (tmp_path / "job").write_text(head + line)
    for code in (0, 7):
        command = [ROOT / "slurm/local/run.sh", *options, tmp_path / "job", str(code)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, sorted(done.stdout.splitlines())) == (code, expected)
        failed = [f"srun: error: localhost: task {line[0]}: Exited with exit code 7" for line in expected if code]
        assert sorted(done.stderr.splitlines()) == failed


@pytest.mark.integration
def test_its_result_is_that_of_slurm_to_the_last_bit(slurm, on_slurm, here):
    assert here["04_ddp"].result()["loss"] == on_slurm["ddp"].result()["loss"]
    assert_same(content(here["04_ddp"]), content(on_slurm["ddp"]))


def test_the_same_call_attaches_here_too_and_again_does_not(no_slurm, here, capsys):
    job = here["01_baseline"]
    assert ask_for(job) == job
    assert capsys.readouterr().out.splitlines() == [f"{job}: attached; again=True would submit it anew"]
    anew = ask_for(job, again=True)
    anew.cancel()
    assert capsys.readouterr().out == f"{anew}: there is no Slurm here, so its ranks run on this machine\n"
    assert anew.run != job.run and (Path(job.run) / "metrics.jsonl").exists()
    with pytest.raises(JobError, match="was cancelled"):
        anew.result()


def test_a_cancelled_job_leaves_no_process(no_slurm, small, tmp_path):
    job = submit("04_ddp", nodes=1, **ENDLESS, **small, runs=str(tmp_path))
    wait_until(lambda: has_steps(job), every=0.1)
    assert (job.status().state, job.status().ranks) == ("RUNNING", 2)  # of one node
    pids = below(job.number)
    assert len(pids) > 4
    job.cancel()
    wait_until_gone(pids)
    with pytest.raises(JobError, match=r"was cancelled at step \d+ of"):
        job.result()


def test_a_killed_rank_is_named_here_too(no_slurm, small, tmp_path):
    job = submit("05_launch", nodes=1, **ENDLESS, **small, runs=str(tmp_path))
    wait_until(lambda: has_steps(job), every=0.1)
    find_rank(job, 1).kill()
    with pytest.raises(JobError, match=r"failed at step \d+ of \d+: rank 1 killed by signal 9$"):
        job.result()


def test_a_job_that_never_trained_has_no_result(no_slurm, here):
    """Its script ended well; whoever edits one may leave the training out."""
    job = dataclasses.replace(here["01_baseline"], run=here["01_baseline"].run + "-elsewhere")
    with pytest.raises(JobError, match="has not come to an end"):
        job.result()


# ---- in Lab: a real kernel -------------------------------------------------------------------------------------------------


class Notebook:
    """A kernel, and all that it has sent."""

    def __init__(self, variables: dict[str, str]):
        self.manager, self.client = start_new_kernel(kernel_name="python3", env=variables, cwd=str(ROOT))
        self.seen: list[dict] = []

    def read(self, until: Callable[[], object]) -> None:
        while not until():
            self.seen.append(self.client.get_iopub_msg(timeout=60))

    def finish(self, cell: str) -> list[dict]:
        """What a cell has sent, when it is done."""
        self.read(lambda: any(m["content"].get("execution_state") == "idle" for m in self.sent_by(cell)))
        return self.sent_by(cell)

    def sent_by(self, cell: str) -> list[dict]:
        return [message for message in self.seen if message["parent_header"].get("msg_id") == cell]

    def run(self, code: str) -> str:
        """Run a cell: what it printed."""
        sent = self.finish(self.client.execute(code))
        assert not [m["content"]["traceback"] for m in sent if m["msg_type"] == "error"]
        return "".join(m["content"]["text"] for m in sent if m["msg_type"] == "stream")

    def panels(self) -> list[list[dict]]:
        """Bar, button and text of each box that is on display, as they are now."""
        models: dict[str, dict] = {}
        for message in self.seen:
            if message["msg_type"] in ("comm_open", "comm_msg"):
                sent = message["content"]
                models.setdefault(sent["comm_id"], {"id": sent["comm_id"]}).update(sent["data"].get("state", {}))
        boxes = [models[m["content"]["data"][WIDGET]["model_id"]] for m in self.seen if self.is_widget(m)]
        assert all(box["_model_name"] == "HBoxModel" for box in boxes)
        return [[models[child.removeprefix("IPY_MODEL_")] for child in box["children"]] for box in boxes]

    @staticmethod
    def is_widget(message: dict) -> bool:
        return message["msg_type"] == "display_data" and WIDGET in message["content"]["data"]

    def click(self, button: dict) -> None:
        """What the browser sends."""
        data = {"method": "custom", "content": {"event": "click"}}
        self.client.shell_channel.send(
            self.client.session.msg(
                "comm_msg", {"comm_id": button["id"], "data": data, "target_name": "jupyter.widget"}
            )
        )


@pytest.fixture(scope="module")
def notebook(path_without, small) -> Iterator[Notebook]:
    variables = {name: value for name, value in os.environ.items() if name not in ("COURSE_PLAIN", "SLURM_CONF")}
    one = Notebook(variables | {"PATH": path_without})
    one.run(f"import os\nfrom course_lib import jobs\nsmall = {small!r}\nendless = small | {ENDLESS!r}")
    yield one
    one.client.stop_channels()
    one.manager.shutdown_kernel(now=True)


def test_in_lab_a_job_shows_how_far_it_is_survives_the_stop_button_and_is_cancelled_by_its_own(notebook, tmp_path):
    started = f"job = jobs.submit('01_baseline', cpus_per_task=1, runs={str(tmp_path)!r}, **endless); print(job.number)"
    printed = notebook.run(started)
    assert "there is no Slurm here" in printed
    pids = below(int(printed.split()[-1]))
    assert notebook.run("job") == ""
    [[bar, button, text]] = notebook.panels()
    notebook.read(lambda: ", step " in notebook.panels()[0][2]["value"])  # by itself: no cell runs

    cell = notebook.client.execute("job.result()")
    notebook.read(lambda: len(notebook.panels()) == 2)
    notebook.manager.interrupt_kernel()
    [error] = [m["content"] for m in notebook.finish(cell) if m["msg_type"] == "error"]
    assert error["ename"] == "KeyboardInterrupt"
    seen = notebook.panels()[0][2]["value"]
    notebook.read(lambda: notebook.panels()[0][2]["value"] != seen)  # only the waiting was interrupted
    assert "running" in notebook.panels()[0][2]["value"]

    notebook.click(button)
    notebook.read(lambda: notebook.panels()[0][0].get("bar_style") == "danger")
    assert "cancelled on this machine" in notebook.panels()[0][2]["value"]
    wait_until_gone(pids)


def test_after_a_kernels_restart_the_same_call_finds_what_is_finished(notebook, no_slurm, here):
    """That kernel is new, and knows of no job but from the files."""
    job, shown = here["04_ddp"], len(notebook.panels())
    loss = job.result()["loss"]
    printed = notebook.run(f"job = jobs.submit({job.script!r}, **{job.asked!r}); print(job.result()['loss'])")
    assert printed.splitlines() == [f"{job}: attached; again=True would submit it anew", str(loss)]
    [[bar, _, text]] = notebook.panels()[shown:]
    assert (bar["bar_style"], bar["value"]) == ("success", 1.0)
    assert f"{job}: completed on this machine after" in text["value"]


@pytest.mark.integration
def test_after_a_kernels_restart_the_same_call_finds_slurms_job(notebook, slurm, on_slurm):
    job, before = on_slurm["ddp"], numbers(slurm)
    found = {name: os.environ[name] for name in ("PATH", "SLURM_CONF")}
    call = f"os.environ |= {found!r}; job = jobs.submit({job.script!r}, **{job.asked!r}); print(job.number)"
    printed = notebook.run(f"old = dict(os.environ); {call}; os.environ |= old; del os.environ['SLURM_CONF']")
    assert printed.splitlines() == [f"{job}: attached; again=True would submit it anew", str(job.number)]
    assert numbers(slurm) == before


def test_a_kernel_that_dies_takes_its_job_along_which_is_then_submitted_anew(notebook, no_slurm, small, tmp_path):
    """Last of its kernel's tests."""
    asked = {"cpus_per_task": 1, "runs": str(tmp_path)}
    notebook.run(f"job = jobs.submit('01_baseline', **{asked!r}, **endless)")
    [path] = tmp_path.glob("jobs/*.json")
    first = jobs._read(path)
    wait_until(first._events)
    pids = below(first.number)
    notebook.manager.shutdown_kernel(now=True)  # SIGKILL
    wait_until_gone(pids)
    assert first.status().state == "LOST"  # we are another process than the one that had it
    second = submit("01_baseline", **asked, **ENDLESS, **small)
    second.cancel()
    assert (second.key, second.attempt) == (first.key, 2) and second.run != first.run


# ---- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "asked", "expected"),
    [
        ("04_dpp", {}, "^'04_dpp' is no job: slurm/ has 01_baseline, 02_data, 03_data_parallel, 04_ddp, 05_launch, "),
        ("../slurm/04_ddp", {}, "is no job: "),
        ("sweep", {}, "is no job: "),  # it takes no run's name
        ("04_ddp", {"epoch": 5}, "^epoch is neither a flag .* nor an option of sbatch; did you mean epochs?"),
        ("04_ddp", {"node": 2}, "did you mean nodes?"),
        ("04_ddp", {"xyzzy": 2}, "sbatch$"),
        ("04_ddp", {"epochs": "5"}, "^--epochs must be int, not '5'$"),
        ("04_ddp", {"epochs": 0}, "^--epochs must be at least 1, not 0$"),
        ("04_ddp", {"norm": "loud"}, "^--norm must be one of group, batch, none, not 'loud'$"),
    ],
)
def test_nonsense_is_refused_before_anything_happens(no_slurm, tmp_path, script, asked, expected):
    with pytest.raises(UserError, match=expected):
        submit(script, runs=str(tmp_path), **asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.integration
def test_what_sbatch_refuses_is_one_line_and_leaves_nothing(slurm, on_slurm):
    before = numbers(slurm)
    with pytest.raises(UserError, match=r"^sbatch refused the job: .*[Ii]nvalid partition name specified$") as refused:
        ask_for(on_slurm["ddp"], partition="nonsense")
    assert len(str(refused.value).splitlines()) == 1
    runs = Path(on_slurm["ddp"].run).parent
    assert numbers(slurm) == before and "nonsense" not in "".join(p.read_text() for p in runs.glob("jobs/*.json"))


@pytest.mark.integration
def test_while_slurm_does_not_answer_nothing_is_submitted_twice(silent, on_slurm):
    job = on_slurm["held"]
    status = job.status()
    assert status.state == "UNKNOWN" and "Unable to contact slurm controller" in status.reason and not status.finished
    assert ask_for(job) == job
    with pytest.raises(JobError, match="could not be cancelled: .*Unable to contact"):
        job.cancel()
    with pytest.raises(UserError, match="^Slurm is installed, but does not answer: .*Unable to contact"):
        ask_for(job, seed=1)
    assert on_slurm["ddp"].wait().state == "COMPLETED"  # says its log


@pytest.mark.integration
def test_a_job_of_a_cluster_seen_from_a_machine_without_slurm(no_slurm, on_slurm):
    """The folder is shared, or was copied."""
    assert str(on_slurm["held"].status()) == "unknown (exit code 127: scontrol is not installed here)"
    assert ask_for(on_slurm["held"]) == on_slurm["held"]
    with pytest.raises(JobError, match="could not be cancelled: .*scancel is not installed here"):
        on_slurm["held"].cancel()
    assert on_slurm["ddp"].wait().state == "COMPLETED"


# ---- Slurm's answers -------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_the_nodes_of_a_cluster(slurm, capsys):
    assert scheduler.nodes() == jobs.find_cluster() == ["node1", "node2"]
    assert capsys.readouterr().out == "Slurm with nodes node1, node2\n"


def test_no_nodes_without_slurm(no_slurm, capsys):
    assert scheduler.nodes() == jobs.find_cluster() == []
    assert capsys.readouterr().out == "no Slurm here: jobs run as ranks on this machine\n"


@pytest.mark.integration
def test_slurms_programs_without_a_cluster_are_no_slurm_until_one_is_started(slurm, monkeypatch, capsys):
    """Starting it is the real script, which finds that it runs already."""
    if Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine belongs to a cluster")
    monkeypatch.setenv("COURSE_CLUSTER", str(slurm))
    monkeypatch.delenv("SLURM_CONF")
    assert scheduler.nodes() == []
    assert jobs.find_cluster() == ["node1", "node2"]
    assert os.environ["SLURM_CONF"] == str(slurm / "slurm.conf")
    assert capsys.readouterr().out.startswith("started a Slurm on this machine; `make cluster-down`")


# What Slurm 22.05's sacct printed of jobs 11111111, 22222222 and so on, recorded with MariaDB and slurmdbd, which is more than
# tests should start. The third was cancelled by root, the fourth is held, and of the fifth the site keeps no comment.
ACCOUNTED = {
    "COMPLETED|ReqNodeNotAvail|00:00:01|00:10:00|node[1-2]|11111111": (
        "COMPLETED",
        "00:00:01",
        "00:10:00",
        "node[1-2]",
    ),
    "FAILED|ReqNodeNotAvail|00:00:00|00:05:00|node1|22222222": ("FAILED", "00:00:00", "00:05:00", "node1"),
    "CANCELLED by 0|ReqNodeNotAvail|00:00:00|00:10:00|node1|33333333": ("CANCELLED", "00:00:00", "00:10:00", "node1"),
    "PENDING|JobHeldUser|00:00:00|00:10:00|None assigned|": ("PENDING", "00:00:00", "00:10:00", ""),
    "COMPLETED|ReqNodeNotAvail|00:00:00|00:10:00|node1|": ("COMPLETED", "00:00:00", "00:10:00", "node1"),
}


def use_sacct(patch: pytest.MonkeyPatch, folder: Path, printed: str, code: int = 0) -> None:
    (folder / "sacct").write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {code}\n")
    (folder / "sacct").chmod(0o755)
    patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("line", ACCOUNTED)
def test_accounting_is_understood(line, tmp_path, monkeypatch):
    use_sacct(monkeypatch, tmp_path, line)
    comment = line.rpartition("|")[2]
    known = Status(**scheduler.ask_accounting(7, comment or "55555555"))
    assert (known.state, known.elapsed, known.limit, known.nodes) == ACCOUNTED[line]
    if comment:  # then it is another job of this number
        assert scheduler.ask_accounting(7, "55555555") is None


@pytest.mark.parametrize(("printed", "code"), [("", 0), ("Slurm accounting storage is disabled", 1)])
def test_accounting_that_knows_nothing(printed, code, tmp_path, monkeypatch):
    use_sacct(monkeypatch, tmp_path, printed, code)
    assert scheduler.ask_accounting(7, "key") is None


@pytest.mark.integration
def test_accounting_remembers_what_the_controller_has_forgotten(slurm, on_slurm, tmp_path, monkeypatch):
    job = dataclasses.replace(on_slurm["late"], number=1, log_file=str(tmp_path / "log"))  # beside it, how a job ended
    wait_until(lambda: has_steps(job), every=0.1)
    assert scheduler.ask_accounting(1, job.key) is None and job.status().state == "LOST"  # there is none here
    use_sacct(monkeypatch, tmp_path, f"TIMEOUT|None|00:01:25|00:01:00|node1|{job.key}")
    status = job.status()
    assert (status.state, status.elapsed, status.reason) == ("TIMEOUT", "00:01:25", "") and status.step > 0


# ---- what is shown ---------------------------------------------------------------------------------------------------------


def test_plain_lines_tell_changes_and_tenths_but_not_the_time(monkeypatch, capsys):
    """An hour's statuses replayed, one a second, and nobody sleeps."""
    pending = [Status("PENDING", reason="Priority" if second < 50 else "Resources") for second in range(100)]
    running = [Status("RUNNING", elapsed=f"00:{n // 60:02}:{n % 60:02}", step=n, steps=3000) for n in range(3001)]
    replayed = iter([*pending, *running, Status("COMPLETED", elapsed="00:50:00", nodes="node1", step=3000, steps=3000)])
    monkeypatch.setattr(cockpit, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None))
    job = SimpleNamespace(status=lambda: next(replayed))
    assert cockpit.follow(job).state == "COMPLETED"
    lines = [line.partition("): ")[2] for line in capsys.readouterr().out.splitlines()]
    tenths = [f"running after 00:{n // 60:02}:00, step {n} of 3000" for n in range(0, 3001, 300)]
    end = "completed on node1 after 00:50:00, step 3000 of 3000"
    assert lines == ["pending (Priority)", "pending (Resources)", *tenths, end]


def test_a_job_on_its_own_is_one_plain_line(no_slurm, here, capsys):
    here["01_baseline"].wait()
    capsys.readouterr()
    here["01_baseline"]._ipython_display_()
    [line] = capsys.readouterr().out.splitlines()
    pattern = r": completed on this machine after 00:\d\d:\d\d, step 6 of 6, [\d,]+ MB in the largest rank"
    assert re.fullmatch(re.escape(str(here["01_baseline"])) + pattern, line)


def test_the_table_of_all_jobs(no_slurm, here):
    losses = [f"{job.result()['loss']:.4f}" for job in here.values()]
    table = jobs.table(Path(here["04_ddp"].run).parent)
    rows = [dict(zip(table.titles, row)) for row in table.rows]
    finished = [row for row in rows if row["job"] != "01_baseline"]  # of which a test has asked again
    assert [row["job"] for row in finished] == list(here)[1:]  # the oldest first
    assert [row["validation loss"] for row in finished] == losses[1:]
    assert {(row["state"], row["steps"]) for row in finished} == {("completed", "6 / 6")}
    assert all("data=" not in row["asked"] and "max_steps=6" in row["asked"] for row in rows)


def test_a_table_is_aligned_text_and_escaped_html():
    table = cockpit.Table(("job", "asked"), [("<b>&", 1), ("x", "long <i>")])
    assert repr(table) == "job   asked\n<b>&  1\nx     long <i>"
    cells = "<tr><td>&lt;b&gt;&amp;</td><td>1</td></tr><tr><td>x</td><td>long &lt;i&gt;</td></tr>"
    assert table._repr_html_() == f"<table><tr><th>job</th><th>asked</th></tr>{cells}</table>"
    assert repr(cockpit.Table(("a", "b"), [])) == "a  b"


# ---- a minute later --------------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_a_job_over_its_time_limit_says_which_call_goes_on_and_that_one_does(slurm, on_slurm, capsys):
    """The last test, for the smallest limit is a minute, and Slurm looks twice a minute."""
    job = on_slurm["late"]
    call = rf'submit\("01_baseline", …, name="{Path(job.run).name}", resume=True\)'
    with pytest.raises(JobError, match=rf"over its time limit of 00:01:00 at step \d+ of .* and go on with {call}$"):
        job.result()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 2 and lines[-1].startswith(f"{job}: timeout on node1")  # however long it took
    at = job.status().step
    more = ask_for(job, name=Path(job.run).name, resume=True, time=5, max_steps=at + 10, epochs=at + 10)
    assert more.result()["step"] == at + 10
    assert more.log_file != job.log_file and read_log(job.run, repeats=True)[0]["step"] == 0  # it is the same run
