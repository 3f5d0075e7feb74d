"""A real Slurm with two nodes on this machine: started and stopped, and ranks on its nodes and inside its jobs."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from helpers import (
    BIN,
    LOCAL,
    ROOT,
    ask,
    assert_same,
    cluster_script,
    remove_logs,
    result,
    start_cluster,
    wait_until,
    wait_until_idle,
)

from course_lib import results
from course_lib.metrics import read_log

RANKS_IN_A_JOB = """
import os, psutil
from course_lib import ranks
from helpers import wait_until
join = '''
import socket, torch.distributed as dist
from course_lib.config import Config
from course_lib.world import start
world = start(Config(launcher="mpi", device="cpu", timeout=30))
sizes = [None] * world.world_size
dist.all_gather_object(sizes, world.local_rank)
print(socket.gethostname(), world.rank, world.local_rank, sizes)
'''
if os.environ["SLURM_JOB_NUM_NODES"] == "1":
    with ranks.start(2) as team:
        team.run(join)
    with ranks.start(4, slurm="--nodes=2 --ntasks-per-node=2") as team:
        team.run(join)
else:
    with ranks.start(4) as team:
        team.run(join)
        os.kill(team.pids[3], 9)
        try:
            team.run("import torch.distributed as dist; dist.barrier()")
        except ranks.RanksError as error:
            print(error)
    wait_until(lambda: not any(map(psutil.pid_exists, team.pids)))
print("all done")
"""


def alive() -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["status"]) if one.info["status"] != psutil.STATUS_ZOMBIE]


def daemons(folder: Path) -> set[int]:
    found = {int(path.read_text()) for path in (folder / "run").glob("*.pid")}
    return found & {process.pid for process in alive()}


@pytest.mark.integration
def test_two_nodes_with_names_of_their_own_run_jobs(cluster):
    assert sorted(ask(cluster, "srun", "--nodes=2", "hostname").split()) == ["node1", "node2"]


@pytest.mark.integration
def test_started_twice_it_stays_as_it_is(cluster):
    before = daemons(cluster)
    assert len(before) == 4  # munged, slurmctld and two slurmd
    assert cluster_script("up.sh", cluster).strip() == f"export SLURM_CONF={cluster / 'slurm.conf'}"
    assert daemons(cluster) == before


@pytest.mark.integration
def test_it_needs_no_root(cluster):
    """As nobody, where this is root: two nodes, jobs, and nothing left."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        shutil.copytree(LOCAL, f"{folder}/local")  # the repository may be in a folder that others can't read
        os.chmod(folder, 0o1777)  # as a temporary folder is
        up, down = (f"{folder}/local/{name}.sh {folder}/state" for name in ("up", "down"))
        work = f"eval $({up}); srun --nodes=2 --label bash -c 'hostname; id -u'; cat {folder}/state/run/*.pid; {down}"
        command = ["su", "nobody", "-s", "/bin/bash", "-c", work] if os.getuid() == 0 else ["bash", "-c", work]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert {line[:2] for line in lines[:4]} == {"0:", "1:"} and {"0: node1", "1: node2"} < set(lines[:4])
        assert not {"0: 0", "1: 0"} & set(lines[:4])
        assert not {int(pid) for pid in lines[4:]} & {process.pid for process in alive()}


@pytest.mark.integration
def test_a_missing_package_is_one_clear_line(no_slurm):
    done = subprocess.run([LOCAL / "up.sh"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "is missing; on Debian or Ubuntu: apt-get install slurm-wlm slurm-client munge" in done.stderr


@pytest.mark.integration
def test_ranks_inside_a_job_and_on_nodes(cluster, tmp_path):
    """A notebook that is itself a Slurm job starts ranks on its own nodes, and others as a second job on both nodes."""
    program = tmp_path / "inside.py"
    program.write_text(RANKS_IN_A_JOB)
    numbers = {}
    for nodes in (1, 2):
        options = [f"--nodes={nodes}", f"--ntasks={nodes}", "--mem-per-cpu=500", f"--output={tmp_path / str(nodes)}"]
        environment = f"--export=ALL,PYTHONPATH={Path(__file__).parent}"
        words = ["--parsable", environment, *options, f"--wrap={sys.executable} {program}"]
        numbers[nodes] = ask(cluster, "sbatch", *words).strip()
    asked = ["squeue", "--noheader", f"--jobs={','.join(numbers.values())}", "--states=PD,R,CG"]
    wait_until(lambda: not ask(cluster, *asked), every=0.5)
    printed, on_both = ((tmp_path / str(nodes)).read_text() for nodes in numbers)
    assert "all done" in printed and "all done" in on_both, printed + on_both
    here, step = (
        [line.split(maxsplit=5)[2:] for line in text.splitlines() if line.startswith("[rank")]
        for text in (printed, on_both)
    )
    assert "rank 3 was killed by signal 9, and the others were stopped" in on_both, on_both
    assert [(line[0], line[1]) for line in step] == [("node1", "0"), ("node1", "1"), ("node2", "2"), ("node2", "3")]
    assert [line[1] for line in here] == ["0", "1", "0", "1", "2", "3"]
    assert here[0][0] == here[1][0]  # beside the job, on its node
    assert [line[0] for line in here[2:]] == ["node1", "node1", "node2", "node2"]
    assert here[5][3] == "[0, 1, 0, 1]"
    wait_until_idle(cluster)  # the second job has ended with its ranks


@pytest.mark.integration
@pytest.mark.timeout(1200)  # some forty ranks at once
def test_every_job_trains_and_four_ranks_agree_whoever_starts_them(cluster, base, case_studies, tmp_path):
    """All at the same time, as far as two nodes have room for them."""
    config = base.replace(runs=str(tmp_path), max_steps=6, timeout=240)
    jobs = {path.stem: path for path in sorted((ROOT / "slurm").glob("[0-9]*.sbatch"))}
    assert len(jobs) == 12
    jobs["09_by_srun"] = jobs["09_mpi"]
    if not find_spec("horovod"):  # optional; that CI has it is a test of its own
        del jobs["10_horovod"]
    environment = {**os.environ, "SLURM_CONF": str(cluster / "slurm.conf"), "DATA": config.data}
    environment["PATH"] = f"{BIN}:{environment['PATH']}"  # of the venv that runs this test, wherever it is
    for name, path in jobs.items():
        environment["MPI_LAUNCH"] = "srun --mpi=pmi2" if name == "09_by_srun" else ""
        own = config.replace(name=name, **case_studies.get(name, {}))
        words = [
            word for word in own.arguments() if not (name == "02_data" and word.startswith("--data"))
        ]  # it has DATA
        command = ["sbatch", f"--output={tmp_path / name}.log", path, *words]
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=True)
    try:
        wait_until_idle(cluster, seconds=900)
    finally:
        ask(cluster, "scancel", "--me")  # or the tests that follow would wait for them too
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in jobs}
    assert all(log.count("done: ") == 1 for log in logs.values()), logs
    ends = {name: read_log(config.replace(name=name).run) for name in jobs}
    places = {name: (events[0]["world_size"], events[0]["nodes"]) for name, events in ends.items()}
    four = ("04_ddp", "05_launch", "08_sharding", "09_mpi", "09_by_srun", "10_horovod", "11_lightning", *case_studies)
    alone = ("01_baseline", "02_data", "03_data_parallel")
    expected = dict.fromkeys(alone, (1, 1)) | dict.fromkeys(four, (4, 2)) | {"07_model_parallel": (2, 2)}
    assert places == {name: expected[name] for name in jobs}
    ddp = result(config.replace(name="04_ddp"))
    for name in ("05_launch", "09_mpi", "09_by_srun"):  # whoever starts them on two nodes: bit for bit
        assert_same(result(config.replace(name=name)), ddp)
    by_lightning = result(config.replace(name="11_lightning"))  # its optimizer also remembers a schedule
    for part in ("model", "position", "log"):
        assert_same(by_lightning[part], ddp[part])
    assert_same(by_lightning["optimizer"]["state"], ddp["optimizer"]["state"])
    if "10_horovod" in jobs:
        torch.testing.assert_close(result(config.replace(name="10_horovod"))["model"], ddp["model"])


@pytest.mark.integration
def test_a_sweep_trains_on_each_number_of_ranks_and_draws_its_figure(cluster, base):
    """Jobs of the same global batch with two seeds, one after the other, then the one that waits for all of them."""
    flags = base.replace(global_batch=8, max_steps=4).arguments()
    words = [word for word in flags if not word.startswith(("--runs", "--batch"))]
    folder = ROOT / "runs" / f"swept-by-slurm-{os.getpid()}"
    try:
        printed = ask(cluster, ROOT / "slurm/sweep.sh", "1,2%1", "--seeds=0,1", f"--name={folder.name}", *words)
        assert re.match(r"jobs \d+ \d+ train on 1,2%1 ranks; then \d+ writes", printed)
        wait_until_idle(cluster, seconds=480)
        assert (folder / "scaling.png").stat().st_size > 10_000
        rows = results.summarise(results.collect(folder))
        assert [(row["ranks"], row["seeds"]) for row in rows] == [(1, 2), (2, 2)]
        assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4)
    finally:
        ask(cluster, "scancel", "--me")
        shutil.rmtree(folder, ignore_errors=True)
        remove_logs(cluster)


@pytest.mark.integration
@pytest.mark.parametrize("ranks", ["", "1,x", "1-4", "-1"])
def test_a_sweep_of_nonsense_is_refused(cluster, ranks):
    environment = {**os.environ, "SLURM_CONF": str(cluster / "slurm.conf")}
    done = subprocess.run(
        ["slurm/sweep.sh", ranks], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "1,2,4" in done.stderr
    assert not ask(cluster, "squeue", "--noheader")


def test_scripts_are_clean():
    scripts = [*ROOT.glob("slurm/*.s*"), *LOCAL.glob("*.sh")]
    assert len(scripts) >= 9
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
        assert len(script.read_text().splitlines()) <= (120 if script.parent == LOCAL else 40), script


@pytest.mark.integration
def test_scripts_please_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    scripts = [*ROOT.glob("slurm/*.s*"), *LOCAL.glob("*.sh"), *ROOT.glob("hub/*.sh"), *(ROOT / ".ci").glob("*[!y]")]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.integration
def test_stopped_twice_nothing_is_left(cluster):
    """Of a second cluster: two may run beside each other, and the first one stays as it is."""
    others = daemons(cluster)
    with start_cluster() as folder:
        running = daemons(folder)
        assert len(running) == 4
        cluster_script("down.sh", folder)
        wait_until(lambda: not daemons(folder) & running)
        cluster_script("down.sh", folder)
        cluster_script("up.sh", folder)
        assert len(daemons(folder)) == 4
    assert daemons(cluster) == others


def submit_and_wait(cluster: Path, log: Path, *words: object, **variables: str) -> str:
    """Submit one of the course's scripts from the repository's folder; what its job printed."""
    environment = {**os.environ, "SLURM_CONF": str(cluster / "slurm.conf"), **variables}
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    command = ["sbatch", f"--output={log}", *map(str, words)]
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60, check=True)
    wait_until_idle(cluster, seconds=480)
    return log.read_text()


@pytest.mark.integration
def test_the_preflight_asks_the_doctor_on_every_node(cluster, tmp_path):
    said = submit_and_wait(cluster, tmp_path / "log", "slurm/preflight.sbatch")
    assert "0: on node1" in said and "1: on node2" in said
    assert said.rstrip().endswith("2 of 2 nodes can run the course"), said


@pytest.mark.integration
def test_the_preflight_names_a_node_that_never_answers(cluster, tmp_path):
    """The doctor of node1 is in a hurry here, and that of node2 finds no end."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" = node1 ] && echo "The course can run here" || exec sleep 300\n')
    python.chmod(0o755)
    variables = {"VENV": str(tmp_path / "venv"), "PATIENCE": "5"}
    said = submit_and_wait(cluster, tmp_path / "log", "slurm/preflight.sbatch", **variables)
    assert "0: The course can run here" in said and "node2: no answer\n" in said and "node1: no answer" not in said, (
        said
    )
    assert said.rstrip().endswith("1 of 2 nodes can run the course"), said


@pytest.mark.integration
def test_a_class_is_graded_on_two_nodes_at_once(cluster, tmp_path):
    """As one by one (test_grading.py): full marks for the solution, none for the stub."""
    name = "ex00_start"
    for student, folder in {"ada": "solutions", "bob": "exercises", "eve": "exercises"}.items():
        shutil.copytree(ROOT / folder / name, tmp_path / "submitted" / student / name)
    words = ["--nodes=2", "--ntasks=2", "slurm/grade.sbatch", name]
    said = submit_and_wait(cluster, tmp_path / "log", *words, COURSE_GRADING=str(tmp_path))
    marks = {line.split()[0]: line.split()[2:] for line in said.splitlines() if name in line}
    best = marks["ada"][-1]
    assert marks == {"ada": [best, "of", best], "bob": ["0", "of", best], "eve": ["0", "of", best]}, said
