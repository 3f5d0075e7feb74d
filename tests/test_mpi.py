"""MPI and Horovod on real ranks: collectives made of messages == MPI's own; whoever averages the gradients, DDP's weights."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import BIN, assert_same, result, torchrun

from course_lib import processes
from course_lib.config import Config, UserError
from course_lib.metrics import read_log
from course_lib.parallel import BY_OTHERS, horovod
from course_lib.parallel.horovod import count_messages
from course_lib.world import World

HERE = Path(__file__).parent
STOP_AND_GO = """
import itertools, sys
from course_lib.config import Config
from course_lib.trainer import fit
from course_lib.world import start, stop

config = Config.parse(sys.argv[1:])
world = start(config)
lines = itertools.count(1)
fit(config, world, told=lambda: next(lines) == 7)
fit(config.replace(resume=True), world)
stop(world)
"""
HOROVOD = ["horovod"] if find_spec("horovod") else []


def mpirun(ranks: int, *words: object, **variables: str) -> str:
    """Run a program on so many ranks of one MPI world, to success: all that was printed."""
    command = [BIN / "mpirun", "-n", ranks, sys.executable, "-m", "mpi4py", *words]
    code, output = processes.run(list(map(str, command)), timeout=240, environments=[variables])
    assert code == 0, output
    return output


@pytest.mark.integration
def test_horovod_is_here():
    """All tests that need it pass without it: in CI it must be there."""
    if not HOROVOD:
        pytest.skip("Horovod is not installed: make horovod")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_collectives_made_of_messages_are_mpis(ranks):
    assert mpirun(ranks, HERE / "on_messages.py", ranks).count("40 equal") == ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_whoever_averages_the_gradients_the_weights_are_those_of_ddp(ranks):
    """On two ranks to the last bit; with more, everybody may add in another order."""
    names = ["mpi", "mpi_ring", *HOROVOD]
    printed = mpirun(ranks, HERE / "on_mpi.py", ranks, *names)
    for name in names:
        assert printed.count(f"{name} to the last bit" if ranks == 2 else f"{name} to ") == ranks, printed


@pytest.fixture(scope="module")
def two_epochs(base) -> Config:
    """The run of `trained`, without a timeline."""
    return base.replace(epochs=2, bucket_mb=5e-4)


@pytest.mark.parametrize("strategy", ["mpi_ring", *HOROVOD])
def test_a_run_by_mpi_leaves_the_checkpoint_of_ddp_by_torchrun(trained, two_epochs, tmp_path, strategy):
    config = two_epochs.replace(runs=str(tmp_path), strategy=strategy, launcher="mpi")
    mpirun(2, "-m", "course_lib.train", *config.arguments())
    assert_same(result(config), result(trained["ddp"]))


@pytest.mark.skipif(not HOROVOD, reason="Horovod is not installed: make horovod")
def test_horovod_under_torchrun_stopped_and_resumed_is_ddp_too(trained, two_epochs, tmp_path):
    """There the ranks meet by gloo."""
    config = two_epochs.replace(runs=str(tmp_path), strategy="horovod")
    program = tmp_path / "stop_and_go.py"
    program.write_text(STOP_AND_GO)
    code, output = torchrun(2, program, *config.arguments())
    assert code == 0, output
    stops = [event["step"] for event in read_log(config.run, repeats=True) if event["event"] == "stop"]
    assert stops == [7]
    assert_same(result(config), result(trained["ddp"]))


@pytest.mark.skipif(not HOROVOD, reason="Horovod is not installed: make horovod")
def test_horovod_fuses_what_is_ready_at_the_same_time(two_epochs, tmp_path):
    config = two_epochs.replace(runs=str(tmp_path), strategy="horovod", launcher="mpi", max_steps=3)
    found = {}
    for threshold in (0, 2**26):
        file = tmp_path / f"{threshold}.json"
        variables = {"HOROVOD_TIMELINE": str(file), "HOROVOD_FUSION_THRESHOLD": str(threshold)}
        mpirun(2, "-m", "course_lib.train", *config.arguments(), HOROVOD_CYCLE_TIME="20", **variables)
        found[threshold] = count_messages(file)
    (gradients, messages), (same, fewer) = found.values()
    assert gradients == messages == same > fewer >= 3


def test_gradients_by_mpi_need_one_mpi_world():
    """Under torchrun each rank would be alone in MPI's eyes, and average with nobody."""
    for name in ("mpi", "mpi_ring"):
        with pytest.raises(UserError, match=f"--strategy {name} needs all 2 ranks in one MPI world.*--launcher mpi$"):
            BY_OTHERS[name](torch.nn.Linear(1, 1), World(0, 0, 2), Config(strategy=name))


def test_without_horovod_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(horovod, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="^--strategy horovod: Horovod is not installed; `make horovod`"):
        horovod.horovod(torch.nn.Linear(1, 1), World(0, 0, 2), Config(strategy="horovod"))


def test_an_optimizer_that_has_a_state_is_not_wrapped():
    """Horovod would drop it without a word."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(1)
    optimizer.step()
    wrapped = horovod.Horovod.__new__(horovod.Horovod)
    with pytest.raises(ValueError, match="wrap it first, then load the state"):
        horovod.wrap_optimizer(wrapped, optimizer)
    assert horovod.wrap_optimizer(torch.nn.Linear(1, 1), optimizer) is optimizer  # every other strategy leaves it alone
