"""The doctor says what is true of this machine, and FAILs or WARNs for real causes: each is provoked here."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from course_lib import doctor, machine
from course_lib.kernel import FileKernel
from course_lib.machine import FAIL, OK, WARN

NAMES = [check.__name__.removeprefix("check_").replace("_", " ") for check in doctor.CHECKS] + ["gloo", "mpi"]
# Starts the ranks, but not as one world: what the launcher of another MPI does.
WORLDS_OF_ONE = """shift 2; "$@" & "$@"; code=$?; wait; exit $code"""


def run_doctor(*arguments):
    """The doctor as a learner starts it: (exit code, {name: (status, rest of the line)})."""
    command = [sys.executable, "-m", "course_lib.doctor", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in result.stdout + result.stderr
    *lines, _ = result.stdout.splitlines()
    return result.returncode, {line[6:19].strip(): (line[:4].strip(), line[21:]) for line in lines}


@pytest.fixture
def script(tmp_path):
    """Write an executable shell script; returns its path."""

    def write(name: str, body: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_the_course_can_run_here():
    code, found = run_doctor()
    assert code == 0, found
    assert list(found) == NAMES
    assert all(status != FAIL for status, _ in found.values())
    assert found["gloo"] == found["mpi"] == (OK, doctor.RIGHT)


def test_in_a_notebook():
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    notebook.cells = [nbformat.v4.new_code_cell("from course_lib import doctor\nassert doctor.report() is True")]
    NotebookClient(notebook, timeout=300, kernel_manager_class=FileKernel).execute()
    text = "".join(output.text for output in notebook.cells[0].outputs if output.name == "stdout")
    assert len(text.splitlines()) == len(NAMES) + 1


def test_worlds_of_one_fail(script):
    found = doctor.check_mpi(mpirun=script("mpirun", WORLDS_OF_ONE))
    assert found.status == FAIL
    assert "a world of 1, not of 2" in found.found
    assert "another MPI" in found.found
    assert str(Path(sys.executable).with_name("mpirun")) in found.advice


def test_a_failure_is_exit_code_1_and_the_rest_is_still_examined(script):
    code, found = run_doctor("--timeout", "0.2", "--mpirun", script("mpirun", "echo stuck; sleep 600"))
    assert code == 1
    assert list(found) == NAMES
    assert found["gloo"][0] == found["mpi"][0] == FAIL
    assert "no answer in 0.2 s" in found["gloo"][1]
    assert found["mpi"][1].startswith("no answer in 0.2 s: ")
    assert all(" -> " in line for status, line in found.values() if status != OK)


@pytest.mark.parametrize("body", ["exit 0", "echo hello"])
def test_a_launcher_that_starts_nothing_fails(script, body):
    assert doctor.check_mpi(mpirun=script("mpirun", body)).status == FAIL


def test_a_launcher_that_is_not_there_fails():
    found = doctor._guarded(FAIL, doctor.check_mpi, 60, "/no/such/mpirun")
    assert found[:2] == (FAIL, "mpi")
    assert "/no/such/mpirun" in found.found


def test_gloo_shows_the_last_line_of_its_error(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    found = doctor.check_gloo()
    assert found.status == FAIL
    assert "Unable to find address for: nosuch0" in found.found
    assert "unset GLOO_SOCKET_IFNAME" in found.advice


def test_no_answer_is_a_failure_and_leaves_no_process(script, tmp_path):
    """Not even a grandchild that holds the output open in a session of its own."""
    launcher = script("mpirun", f"setsid sleep 600 & echo $! > {tmp_path}/pid; echo still here; wait")
    found = doctor.check_mpi(timeout=3, mpirun=launcher)
    assert (found.status, found.found) == (FAIL, "no answer in 3 s: still here")
    running = [item.pid for item in psutil.process_iter(["status"]) if item.info["status"] != psutil.STATUS_ZOMBIE]
    assert int((tmp_path / "pid").read_text()) not in running


def test_works_inside_a_slurm_job_and_an_mpi_rank(monkeypatch):
    for name, value in {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "99", "SLURM_NNODES": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    assert doctor.check_mpi().status == OK
    assert "this process is in job 42" in machine.check_slurm().found


def test_slurm(monkeypatch, script, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_CONF", "kept")
    monkeypatch.setenv("SLURM_NTASKS", "dropped")
    script("sinfo", 'echo "debug* 2 $SLURM_CONF$SLURM_NTASKS"')
    assert machine.check_slurm()[:3] == (OK, "slurm", "debug* 2 kept")
    script("sinfo", "echo slurm_load_partitions: Unable to contact slurm controller >&2; exit 1")
    found = machine.check_slurm()
    assert found.status == WARN
    assert "Unable to contact slurm controller" in found.found
    script("sinfo", "sleep 600")
    assert machine.check_slurm(timeout=0.2).status == WARN


def test_another_mpirun_first_on_the_path(monkeypatch, script, tmp_path):
    ours = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{ours}{os.pathsep}{os.environ['PATH']}")
    assert machine.check_mpirun().status == OK
    other = script("mpirun", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = machine.check_mpirun()
    assert (found.status, found.found) == (WARN, f"{other} hides {ours / 'mpirun'}")
    assert f'export PATH="{ours}:$PATH"' in found.advice


def test_a_missing_package_fails():
    found = machine.check_packages(["numpy", "nosuchpackage"])
    assert found.status == FAIL
    assert "nosuchpackage" in found.found
    assert "numpy" not in found.found
    assert "make setup" in found.advice


def test_another_python_fails(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    found = machine.check_python()
    assert found.status == FAIL
    assert "3.9.1" in found.found


def test_low_limits_warn():
    """In a process of its own: what is lowered there stays low."""
    program = """
import os, resource
from course_lib import machine
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(machine.check_open_files().status, machine.check_cores().status)
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
print(machine.check_ports().status)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.split() == [WARN, WARN, FAIL]


def test_little_memory_and_little_shared_memory(monkeypatch, tmp_path):
    for limit, status in ((10**12, OK), (10**9, WARN), (10**8, FAIL)):
        monkeypatch.setattr(machine, "_control_groups", lambda file, limit=limit: [[str(limit)]])
        assert machine.check_memory().status == status
    usage = os.statvfs(tmp_path)
    assert machine.check_shared_memory(str(tmp_path)).status == (OK if usage.f_bavail * usage.f_frsize >= 5e8 else WARN)
    assert machine.check_shared_memory("/proc").status == WARN  # a file system of no size
    assert machine.check_disk(["/proc"]).status == FAIL


@pytest.mark.parametrize(("table", "folder"), [("0::/job/step", "."), ("3:cpu:/\n4:memory:/job/step", "memory")])
def test_limits_of_the_control_group_and_of_those_above_it(tmp_path, table, folder):
    (tmp_path / "table").write_text(table)
    (tmp_path / "limit").write_text("above all groups\n")
    job = tmp_path / "mount" / folder / "job"
    (job / "step").mkdir(parents=True)
    (job / "limit").write_text("5 6\n")
    (job / "step/limit").write_text("max\n")
    found = machine._control_groups("limit", table=str(tmp_path / "table"), mount=str(tmp_path / "mount"))
    assert found == [["max"], ["5", "6"]]
    assert machine._control_groups("limit", table="/no/such/table") == []


def test_a_check_that_breaks_is_a_finding(monkeypatch, capsys):
    def check_broken_thing():
        raise ValueError("two\nlines")

    monkeypatch.setattr(doctor, "CHECKS", [check_broken_thing])
    monkeypatch.setattr(doctor, "check_gloo", lambda timeout: doctor.Finding(OK, "gloo", ""))
    monkeypatch.setattr(doctor, "check_mpi", lambda timeout, mpirun: doctor.Finding(OK, "mpi", ""))
    assert doctor.main([]) == 0  # a WARN
    assert "WARN  broken thing   ValueError: two lines -> " in capsys.readouterr().out
    monkeypatch.setattr(doctor, "check_gloo", lambda timeout: 1 / 0)
    assert doctor.main([]) == 1
