"""Reliability on real processes: ranks are killed and jobs run out of time, and the result is the same to the last bit.

COURSE_SOAK=100 kills a hundred times instead of six; COURSE_SEED=… kills again where a failed test says it did.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from helpers import BIN, ROOT, ask, assert_same, environment, result, wait_until, wait_until_idle

from course_lib import checkpoint, processes
from course_lib.config import Config
from course_lib.metrics import read_log
from course_lib.train import STOPPED
from course_lib.trainer import fit
from course_lib.world import World

KILLS = int(os.environ.get("COURSE_SOAK", "6"))  # even, as all of them: each rank has its half
LATE, JOB_KILLS = ["late-04_ddp", "late-05_launch", "late-11_lightning"], {"killed-04_ddp": 4, "killed-05_launch": 2}
SEED = int(os.environ.get("COURSE_SEED", random.randrange(2**32)))
STEPS, EPOCH = 300, 25  # on two ranks
SAVED = 17  # odd, and no part of an epoch: kills fall between checkpoints, and before the first
# torchrun, many at once, and their ranks, all forked: twenty times to import torch, and forty, would take minutes of a core.
LAUNCHES = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.launcher import elastic_launch
from course_lib.config import Config
from course_lib.world import start, stop

def meet(number):
    world = start(Config(device="cpu", timeout=300))
    mine = torch.tensor([float(number)])
    dist.all_reduce(mine)
    assert world.world_size == 2 and mine == 2.0 * number, mine
    stop(world)

def fork_ranks(config, entrypoint):
    config.start_method = "fork"
    return lambda word: elastic_launch(config, meet)(int(word))

torchrun.elastic_launch = fork_ranks
started = []
for number in range(20):
    started.append(os.fork())
    if not started[-1]:
        sys.exit(torchrun.main(["--standalone", "--nproc-per-node=2", "--no-python", "meet", str(number)]))
print("exit codes:", {os.waitpid(pid, 0)[1] for pid in started})
"""
pytestmark = pytest.mark.usefixtures("alone")


# ---- what the tests need ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(base) -> Config:
    return base.replace(strategy="ddp", batch=1, epochs=STEPS // EPOCH, checkpoint_every=SAVED, timeout=300)


@pytest.fixture(scope="module")
def whole(two_ranks) -> Config:
    """Two ranks by torchrun, uninterrupted."""
    config = two_ranks.replace(name="whole")
    with launched(config) as process:
        finish(process, config)
    assert result(config)["position"]["step"] == STEPS
    return config


@contextmanager
def launched(config: Config, *options: str, ranks: int = 2) -> Iterator[psutil.Process]:
    """The training under way, by torchrun on some ranks or alone; nothing of it is left afterwards."""
    torchrun = [BIN / "torchrun", "--standalone", f"--nproc-per-node={ranks}", "--monitor-interval=0.1", *options]
    command = [*(torchrun if ranks > 1 else [sys.executable]), "-m", "course_lib.train", *config.arguments()]
    with open(printed(config), "a") as log:
        process = psutil.Popen(command, env=environment(), stdout=log, stderr=log)
    try:
        yield process
    finally:
        processes.kill_tree([process])


def printed(config: Config) -> Path:
    return Path(config.runs) / f"{config.name}.log"


def finish(process: psutil.Process, config: Config, *, code: int = 0) -> None:
    assert process.wait(240) == code, printed(config).read_text()


def history(config: Config) -> list[dict]:
    """All that was logged, also what was then done again."""
    with suppress(FileNotFoundError):
        return read_log(config.run, repeats=True)
    return []


def events(config: Config, name: str) -> list[dict]:
    return [event for event in history(config) if event["event"] == name]


def has_reached(config: Config, step: int, *, start: int = 1) -> bool:
    """Whether the nth start of this run is under way, and has logged this step. Cheap, for it is asked all the time."""
    log = config.run / "metrics.jsonl"
    text = log.read_text() if log.exists() else ""
    return text.count('{"event": "start"') >= start and int(re.findall(r'"step": (\d+)', text[-2000:])[-1]) >= step


def find_ranks(config: Config) -> dict[int, psutil.Process]:
    """The run's living ranks, whoever has started them."""
    found, words = {}, {f"--runs={config.runs}", f"--name={config.name}"}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if words <= set(process.cmdline()) and process.name().startswith("python"):
                variables = process.environ()
                by_slurm = variables.get("SLURM_PROCID") if "course_lib.lit" in process.cmdline() else None
                if rank := variables.get("RANK", by_slurm):  # Lightning has Slurm's word for it
                    found[int(rank)] = process
    return found


def kill_ranks(config: Config, kills: int, then: Callable[[], None] = lambda: None) -> list[dict]:
    """SIGKILL a random rank at a random step, again and again. Returns the environments that they had."""
    chance, found, starts = random.Random(f"{SEED} {config.name}"), [], 0
    steps = [0, *sorted(chance.choices(range(STEPS * 2 // 3), k=kills - 1))]  # the first before any checkpoint
    ranks = [0, 1] * (kills // 2)
    chance.shuffle(ranks)
    for rank, step in zip(ranks, steps):
        wait_until(partial(has_reached, config, step, start=starts + 1), seconds=300, every=0.01)
        starts, victim = len(events(config, "start")), find_ranks(config)[rank]
        found.append(victim.environ())
        victim.kill()
        print(f"COURSE_SEED={SEED}  {config.name}: rank {rank} killed after step {step}")
        then()
    return found


def assert_killed_and_whole(config: Config, whole: Config, *, kills: int) -> None:
    starts = [event["step"] for event in events(config, "start")]
    print(f"{config.name} started at steps {starts}")
    assert len(starts) > kills  # or not every kill was one
    logged = history(config)
    for last, first in zip(logged, logged[1:]):
        if first["event"] == "start":  # from the last checkpoint, and no older one
            assert last["step"] - SAVED <= first["step"] <= last["step"]
    assert_same(result(config), result(whole))


# ---- torchrun --------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300 + 30 * KILLS)
def test_ranks_killed_again_and_again_under_torchrun(two_ranks, whole):
    """It is launched under the name of a run that is done: of a checkpoint of another launch it takes no notice."""
    config = two_ranks.replace(name="soak")
    shutil.copytree(whole.run, config.run)
    with launched(config, f"--max-restarts={KILLS}") as process:
        wait_until((config.run / "checkpoint.pt.previous").exists)
        kill_ranks(config, KILLS)
        finish(process, config)
    assert_killed_and_whole(config, whole, kills=KILLS)
    for name in ("metrics.jsonl", "checkpoint.pt"):
        assert (config.run / f"{name}.previous").read_bytes() == (whole.run / name).read_bytes()


def test_one_rank_is_told_to_stop_and_both_save_and_stop(two_ranks, whole):
    config = two_ranks.replace(name="told")
    with launched(config) as process:
        wait_until(lambda: has_reached(config, EPOCH + 5))
        find_ranks(config)[1].send_signal(signal.SIGUSR1)
        finish(process, config, code=1)  # torchrun's for ranks that did not end well
    assert f"exitcode  : {STOPPED} " in printed(config).read_text()
    assert_stopped(config)
    with launched(config.replace(resume=True)) as process:
        finish(process, config)
    assert_same(result(config), result(whole))


def assert_stopped(config: Config, *, times: int = 1) -> None:
    stops = events(config, "stop")
    assert len(stops) == times and not events(config, "end")
    assert checkpoint.load(config.run / "checkpoint.pt")["position"]["step"] == stops[-1]["step"] < STEPS


def test_told_to_stop_in_an_epoch_and_in_an_evaluation_and_resumed_equals_uninterrupted(two_ranks):
    """One process alone. In the evaluation it is told twice."""
    config = two_ranks.replace(name="alone", strategy="single", train_years="1980", valid_years="1981,1982")
    with launched(config, ranks=1) as process:
        wait_until(lambda: has_reached(config, 5))
        process.send_signal(signal.SIGUSR1)
        finish(process, config, code=STOPPED)
    assert_stopped(config)
    with launched(config.replace(resume=True), ranks=1) as process:
        wait_until(lambda: is_frozen_in_evaluation(process, config))
        process.send_signal(signal.SIGUSR1)
        process.resume()
        process.send_signal(signal.SIGUSR1)
        finish(process, config, code=STOPPED)
    assert_stopped(config, times=2)
    assert events(config, "stop")[-1]["step"] % EPOCH in (0, 1)  # seldom 0: just before it evaluates
    fit(config.replace(resume=True))
    uninterrupted = config.replace(name="alone-whole")
    fit(uninterrupted)
    assert_same(result(config), result(uninterrupted))


def is_frozen_in_evaluation(process: psutil.Process, config: Config) -> bool:
    """Stop the process if it has logged an epoch's last step and not yet its evaluation; a later epoch will do as well."""

    def evaluates() -> bool:
        last = history(config)[-1]
        return last["event"] == "step" and last["step"] % EPOCH == 0 and last["step"] < STEPS

    if not evaluates():
        return False
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    if not evaluates():
        process.resume()
        return False
    return True


def test_twenty_launches_at_once_do_not_meet():
    """Each finds a port of its own, and adds up only what is its own."""
    code, output = processes.run([sys.executable, "-c", LAUNCHES], timeout=400)
    assert code == 0 and "exit codes: {0}" in output, output


# ---- whose checkpoint it is ------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


def test_a_launch_begun_again_before_its_first_checkpoint_starts_anew(config):
    """What it has set aside when it first began stays there: its own first lines do not take that place."""
    fit(config.replace(max_steps=3), World(launch="the old one"))
    old = {path.name: path.read_bytes() for path in config.run.iterdir()}

    def told() -> bool:
        raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            fit(config, World(launch="the new one"), told=told)
    assert [event["step"] for event in history(config)] == [0, 1, 0, 1]
    fit(config, World(launch="the new one"))
    assert {name: (config.run / f"{name}.previous").read_bytes() for name in old} == old
    fit(config.replace(name="whole"))
    assert_same(result(config), result(config.replace(name="whole")))


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 and garbage"])
def test_garbage_in_the_folder_does_not_stop_a_new_launch(config, content):
    config.run.mkdir()
    (config.run / "checkpoint.pt").write_bytes(content)
    (config.run / "metrics.jsonl").write_bytes(content)
    fit(config.replace(max_steps=2), World(launch="new"))
    assert (config.run / "checkpoint.pt.previous").read_bytes() == content
    assert checkpoint.launch_of(config.run / "checkpoint.pt") == "new"


# ---- Slurm -----------------------------------------------------------------------------------------------------------------


class Job:
    """The job that the run's name ends with, with a rank on each of the two nodes."""

    def __init__(self, cluster: Path, config: Config):
        self.cluster, self.config, self.environments = cluster, config, []
        script = config.name.split("-")[1]
        ranks = "--ntasks-per-node=1" if script != "04_ddp" else "--export=ALL,RANKS_PER_NODE=1,MAX_RESTARTS=9"
        words = ["sbatch", "--parsable", f"--output={printed(config)}", ranks, ROOT / f"slurm/{script}.sbatch"]
        self.number = ask(cluster, *words, *config.arguments()).strip()

    def ask(self, field: str) -> str:
        shown = ask(self.cluster, "scontrol", "show", "job", "--oneliner", self.number)
        return re.search(rf"\b{field}=(\S*)", shown)[1]

    def wait_until(self, *states: str) -> None:
        wait_until(lambda: self.ask("JobState") in states, seconds=300, every=0.5)

    def update(self, *changes: str) -> None:
        ask(self.cluster, "scontrol", "update", f"JobId={self.number}", *changes)

    def go_on(self) -> None:
        """A job that is queued again is held for a while: not here."""
        self.wait_until("PENDING", "RUNNING")
        with suppress(subprocess.CalledProcessError):  # it has begun by itself
            self.update("StartTime=now+2")  # sooner, and the nodes may refuse it: "Job credential revoked"

    def finish(self) -> "Job":
        self.wait_until("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        assert self.ask("JobState") == "COMPLETED", printed(self.config).read_text()
        return self


def be_killed(cluster: Path, config: Config) -> Job:
    """torchrun starts the ranks of both nodes again. Without it the job fails with its rank, and we queue it again."""
    job = Job(cluster, config)

    def queue_again() -> None:
        job.wait_until("FAILED")
        ask(cluster, "scontrol", "requeue", job.number)
        job.go_on()

    job.environments = kill_ranks(config, JOB_KILLS[config.name], queue_again if "05" in config.name else lambda: None)
    return job.finish()


def run_out_of_time(cluster: Path, config: Config, all_stand: threading.Barrier) -> Job:
    """Slurm tells a job that its end is near. Until then the ranks stand still, or they would be done long before."""
    job = Job(cluster, config)
    wait_until(lambda: has_reached(config, 3))
    ranks = find_ranks(config).values()
    for rank in ranks:
        rank.suspend()
    all_stand.wait(240)
    job.environments = [rank.environ() for rank in ranks]
    _, minutes, _ = job.ask("RunTime").split(":")
    job.update(f"TimeLimit={int(minutes) + 2}")  # it is told a minute before, or up to half a minute earlier
    wait_until(lambda: "time is nearly up" in printed(config).read_text(), every=0.1)
    ask(cluster, "scancel", "--batch", "--signal=USR1", job.number)
    time.sleep(1)  # told twice, it still waits for its ranks
    for rank in ranks:
        rank.resume()
    wait_until(lambda: job.ask("Restarts") == "1", every=0.5)
    job.update("TimeLimit=10")  # enough for the rest on a busy machine too
    job.go_on()
    return job.finish()


@pytest.fixture(scope="module")
def jobs(cluster, two_ranks) -> Iterator[dict[str, Future]]:
    """Five jobs at the same time on the same two nodes: two are killed again and again while the others' time runs out."""
    late, killed = ([two_ranks.replace(name=name) for name in names] for names in (LATE, JOB_KILLS))
    all_stand = threading.Barrier(len(late) + 1)
    try:
        with ThreadPoolExecutor() as threads:
            jobs = {config.name: threads.submit(run_out_of_time, cluster, config, all_stand) for config in late}
            all_stand.wait(240)
            killed[0].run.mkdir()
            (killed[0].run / "checkpoint.pt").write_bytes(b"garbage")  # is not in its way
            yield jobs | {config.name: threads.submit(be_killed, cluster, config) for config in killed}
    finally:
        ask(cluster, "scancel", "--me")
        wait_until_idle(cluster)


@pytest.mark.integration
@pytest.mark.parametrize("name", JOB_KILLS)
def test_ranks_killed_again_and_again_on_two_nodes(jobs, whole, name):
    """With torchrun on each node the job never notices; without, it is queued again each time."""
    job, kills = jobs[name].result(), JOB_KILLS[name]
    assert {variables["SLURMD_NODENAME"] for variables in job.environments} == {"node1", "node2"}
    assert job.ask("Restarts") == str(kills if "05" in name else 0)
    assert_killed_and_whole(job.config, whole, kills=kills)


@pytest.mark.integration
@pytest.mark.parametrize("name", LATE)
def test_a_job_whose_time_is_up_saves_queues_again_and_ends_by_itself(jobs, whole, name):
    job = jobs[name].result()
    assert job.ask("Restarts") == "1"
    [stop] = events(job.config, "stop")
    assert [event["step"] for event in events(job.config, "start")] == [0, stop["step"]]
    found, wanted = result(job.config), result(whole)
    if "lightning" in name:  # its optimizer also remembers a schedule
        found["optimizer"], wanted["optimizer"] = found["optimizer"]["state"], wanted["optimizer"]["state"]
    assert_same(found, wanted)


@pytest.mark.integration
def test_jobs_at_the_same_time_on_the_same_nodes_have_ports_of_their_own(jobs):
    places = [{(each["MEET_AT"], each["MEET_PORT"]) for each in job.result().environments} for job in jobs.values()]
    assert all(len(place) == 1 for place in places)  # all ranks of a job, however often it begins
    assert {place for [(place, _)] in places} == {"node1"} and len({port for [(_, port)] in places}) == len(jobs)


@pytest.mark.integration
def test_srun_of_another_mpi_is_refused_by_every_rank(cluster, config, tmp_path):
    """Each takes itself for rank 0 of 1, and would train alone."""
    launcher = ["srun", "--mpi=none", "--nodes=2", "--ntasks=2", f"--error={tmp_path}/%t"]
    flags = config.replace(launcher="mpi", strategy="ddp").arguments()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        ask(cluster, *launcher, sys.executable, "-m", "mpi4py", "-m", "course_lib.train", *flags)
    assert failed.value.returncode == 2
    for rank in "01":
        line, last = (tmp_path / rank).read_text().splitlines()
        assert line.startswith("error: 2 processes were launched, but each is alone in a world of 1")
        assert last.startswith("Abort(2)")  # MPI's own: under mpi4py no rank ends badly without the others
    assert not config.run.exists()
