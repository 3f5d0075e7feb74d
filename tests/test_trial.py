"""Functions tried on ranks of their own: what they return comes back, and whatever goes wrong has an end and a name."""

import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers import wait_until

from course_lib.trial import TrialError, alone, on_mpi, on_ranks

HALF = 0.5


def add(rank: int) -> torch.Tensor:
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return total


def both_receive(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.zeros(1), 1)
    take = dist.recv  # its line does not tell, the calls behind it do
    take(torch.zeros(1), 0)


def all_gather(rank: int) -> None:
    """By its name it would wait for others."""
    while True:
        pass


def loops(rank: int = 0) -> None:
    while True:
        pass


def one_leaves(rank: int) -> None:
    if rank == 1:
        dist.all_reduce(torch.ones(1))


def one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("seven")
    dist.barrier()


def dies(rank: int) -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def one_dies(rank: int) -> None:
    if rank == 1:
        dies(rank)
    dist.barrier()


def one_skips(rank: int) -> None:
    """The second of three; what the others then receive is too long, and gloo aborts."""
    for call in range(3):
        if (rank, call) != (0, 1):
            time.sleep(0.2 * (rank == 0))  # so that the others are waiting already
            dist.all_reduce(torch.ones(6 + 2 * call))


def one_swaps(rank: int) -> None:
    """Only rank 1 is told so by torch; rank 0 has lost it."""
    mine, whole = torch.empty(2), torch.ones(4)
    dist.reduce_scatter_single(*((whole, mine) if rank == 1 else (mine, whole)))


def both_swap(rank: int) -> None:
    dist.all_gather_single(torch.empty(2), torch.ones(4))


def generates(rank: int):
    yield rank


def crashes(rank: int) -> None:
    import ctypes

    ctypes.string_at(0)


def collects(rank: int) -> None:
    kept = []
    while True:
        kept.append(bytes(2**28))


def lacks(rank: int) -> None:
    raise NotImplementedError("no such kernel for this type")


def unwritten(rank: int) -> None:
    raise NotImplementedError()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_returns_its_own(ranks):
    assert on_ranks(ranks, lambda rank: (rank, dist.is_initialized())) == [(rank, ranks > 1) for rank in range(ranks)]
    if ranks > 1:
        assert on_ranks(ranks, add) == [torch.tensor([sum(range(1, ranks + 1))])] * ranks


def test_a_closure_travels_with_what_it_refers_to():
    numbers = torch.arange(4.0)
    assert alone(lambda: numbers * HALF).tolist() == [0.0, 0.5, 1.0, 1.5]


def test_what_ranks_print_is_shown_by_rank(capsys):
    on_ranks(2, lambda rank: print(f"I am {rank}"))
    assert capsys.readouterr().out.splitlines() == ["[rank 0] I am 0", "[rank 1] I am 1"]


@pytest.mark.parametrize(
    "call, words",
    [
        (both_receive, "a deadlock: rank 0 is in `both_receive`, line .*recv.*; rank 1 is in `both_receive`, .*take"),
        (all_gather, "loops, for ever: rank 0 is in `all_gather`, line .*(while True|pass)"),
        (one_leaves, "rank 1 was left alone in `one_leaves`.*had returned already"),
        (one_raises, "rank 1 failed in `one_raises`, line .*: ValueError: seven"),
        (dies, "rank 0 was killed by signal 9"),
        (one_dies, "rank 1 was killed by signal 9"),
        (one_skips, "rank 1 in `one_skips`, line .*was sent another number of bytes"),
        (one_swaps, "rank 1 failed in `one_swaps`, line .*RuntimeError: Check failed: outputShape"),
        (both_swap, "rank 0 failed in `both_swap`, line .*invalid tensor size"),
        (generates, "rank 0 failed: TypeError: it returned a value of type generator, which can't be sent back"),
        (crashes, "rank 0 was killed by signal 11 in `crashes`, line .*string_at"),
        (lacks, "rank 0 failed in `lacks`, line .*no such kernel"),
        pytest.param(
            collects,
            "rank 0 failed in `collects`, line .*MemoryError: it asks for more than 2 GB. A loop without an end",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it"),
        ),
        (unwritten, "^unwritten is still to be written$"),
    ],
)
def test_what_goes_wrong_is_named_with_rank_and_line(call, words):
    with pytest.raises(TrialError, match=words):
        on_ranks(2, call, seconds=2)


def test_who_gets_on_slowly_is_waited_for():
    """As on a machine that many share: it computes a little, now and then, and a rank waits for another that does."""

    def slow(rank):
        for _ in range(5 * rank):
            time.sleep(0.7)
            until = time.process_time() + 0.25
            while time.process_time() < until:
                pass
        dist.barrier()
        return rank

    assert on_ranks(2, slow, seconds=3) == [0, 1]


def test_a_loop_in_one_process_is_stopped():
    with pytest.raises(TrialError, match="stopped after 1 s: your code is in `loops`, line .*A loop without an end"):
        alone(loops, seconds=1)


def test_of_what_a_loop_prints_the_ends_are_shown(capsys):
    """A million lines would stop a browser, and fill a graded notebook."""

    def prints():
        print("x" * 5000)
        while True:
            print("again")

    with pytest.raises(TrialError, match="your code is in `prints`, line "):
        alone(prints, seconds=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("x… (5,000 characters)") and lines[1] == lines[-2] == "again"
    assert len(lines) == 101 and lines[50].endswith(" lines are left out here)")


def test_ranks_of_mpi():
    def ring(rank):
        from mpi4py import MPI

        everyone = MPI.COMM_WORLD
        return everyone.sendrecv(rank, (rank + 1) % everyone.size, source=(rank - 1) % everyone.size)

    def waits(rank):
        from mpi4py import MPI

        MPI.COMM_WORLD.recv(source=1 - rank)

    def raises(rank):
        if rank == 1:
            raise ValueError("seven")
        waits(rank)

    assert on_mpi(3, ring) == [2, 0, 1]
    with pytest.raises(TrialError, match="a deadlock: rank 0 is in `waits`"):
        on_mpi(2, waits, seconds=2)
    with pytest.raises(TrialError, match="rank 1 failed in `raises`, line .*: ValueError: seven"):
        on_mpi(2, raises)


def test_the_stop_button_leaves_the_process_that_ranks_are_forked_from(tmp_path):
    """It interrupts a kernel's whole group: also while that process, just started, imports torch."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, time\n"
        "from course_lib.trial import on_ranks, prepare\n"
        "if __name__ == '__main__':\n"
        "    prepare()\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            os.killpg(0, signal.SIGINT)\n"
        "            time.sleep(10)\n"
        "        except KeyboardInterrupt:\n"
        "            print(on_ranks(2, lambda rank: rank))\n"
    )
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=120, check=False, start_new_session=True
    )
    assert (done.stdout, done.stderr) == ("[0, 1]\n[0, 1]\n", "")


def test_nothing_is_left_of_ranks_that_hang(tmp_path):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(TrialError):
        on_ranks(3, loops, seconds=1)
    time.sleep(0.2)
    after = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in after if child.status() != psutil.STATUS_ZOMBIE]


def test_ranks_end_with_the_notebook_that_asked_for_them(tmp_path):
    """Killed in the middle of a trial, it leaves nobody behind."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time\n"
        "from course_lib.trial import on_ranks\n"
        "def wait(rank):\n"
        f"    open(f'{tmp_path}/pid.{{rank}}', 'w').write(str(os.getpid()))\n"
        "    time.sleep(100)\n"
        "if __name__ == '__main__':\n"
        "    on_ranks(2, wait, seconds=100)\n"
    )
    process = subprocess.Popen([sys.executable, program])
    pids = [tmp_path / f"pid.{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in pids))
    process.kill()
    process.wait()
    wait_until(lambda: not any(psutil.pid_exists(int(path.read_text())) for path in pids), seconds=30)
