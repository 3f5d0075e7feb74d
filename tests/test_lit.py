"""Lightning == our trainer, to the last bit: alone, on ranks whoever starts them, sharded, interrupted, handed over."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_same, environment, result, torchrun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from course_lib import checkpoint, lit, trainer
from course_lib.config import UserError
from course_lib.metrics import read_log
from course_lib.places import settings


def compared(config) -> dict:
    """What must be equal of a run by Lightning and one by our trainer: all but how the optimizer's groups are described."""
    found = result(config)
    return found | {"optimizer": found["optimizer"]["state"]}


@pytest.fixture(scope="module")
def by_us(base):
    config = base.replace(name="by-us", epochs=2)
    trainer.fit(config)
    return compared(config)


@pytest.fixture(autouse=True)
def _alone(alone):
    """Nobody has started these tests but pytest."""


def test_the_trainer_does_what_ours_does(config, by_us):
    config = config.replace(epochs=2)
    fitted, world = lit.fit(config)
    assert_same(compared(config), by_us)
    assert fitted.metrics["loss"] == read_log(config.run)[-2]["loss"] and world.world_size == 1
    kinds = [event["event"] for event in read_log(config.run)]
    assert kinds == ["start", *["step"] * 12, "eval", *["step"] * 12, "eval", "end"]


def test_a_run_cut_short_by_its_steps_is_evaluated_too(config, base):
    config = config.replace(max_steps=5)
    lit.fit(config)
    other = base.replace(name="short", max_steps=5)
    trainer.fit(other)
    assert_same(compared(config), compared(other))


@pytest.mark.parametrize("step", [1, 7, 12, 13])  # the first, inside of an epoch, its last, the next one's first
def test_stopped_and_resumed_by_either_is_as_if_never_stopped(config, by_us, step):
    config, calls = config.replace(epochs=2), []

    def told() -> bool:
        calls.append(1)
        return len(calls) == step

    for go_on in (lit.fit, trainer.fit):
        calls.clear()
        fitted, _ = lit.fit(config, told=told)
        assert fitted.metrics == {} and read_log(config.run)[-1]["event"] == "stop"
        go_on(config.replace(resume=True))
        assert_same(compared(config), by_us)


def test_two_halves_of_a_batch_added_up_are_the_batch(config):
    whole, halves = config.replace(name="whole", max_steps=5), config.replace(name="halves", batch=2, max_steps=5)
    lit.fit(whole)
    lit.fit(halves, accumulate_grad_batches=2)
    ours, other = (compared(one) for one in (halves, whole))
    torch.testing.assert_close(ours["model"], other["model"], rtol=1e-4, atol=1e-6)
    assert ours["position"] == other["position"] and len(ours["log"]) == len(other["log"])
    for mine, its in zip(ours["log"], other["log"]):  # of the last half alone, but not of half its size
        assert mine["loss"] == pytest.approx(its["loss"], rel=0.25)


@pytest.fixture(scope="module")
def on_two_ranks(base, trained):
    """Two epochs of six steps on two ranks, started by torchrun, by Lightning itself, and sharded."""
    config = base.replace(epochs=2, bucket_mb=5e-4, timeout=60)
    runs = {
        "torchrun": config.replace(name="lit-torchrun", strategy="ddp"),
        "itself": config.replace(name="lit-itself", strategy="ddp", devices=2),
        "fsdp": config.replace(name="lit-fsdp", strategy="fsdp"),
    }

    def run(name: str) -> tuple[int, str]:
        if name == "itself":
            command = [sys.executable, "-m", "course_lib.lit", *runs[name].arguments()]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
            return done.returncode, done.stdout + done.stderr
        return torchrun(2, "-m", "course_lib.lit", *runs[name].arguments())

    with ThreadPoolExecutor() as threads:
        for code, output in threads.map(run, runs):
            assert code == 0 and output.count("done: ") == 1, output
    return runs


@pytest.mark.parametrize("name", ["torchrun", "itself", "fsdp"])
def test_on_ranks_it_is_our_ddp_to_the_last_bit(on_two_ranks, trained, name):
    assert_same(compared(on_two_ranks[name]), compared(trained["ddp"]))


def test_its_own_loggers_know_the_same(on_two_ranks):
    """TensorBoard's file, the CSV and our log tell one story."""
    config = on_two_ranks["torchrun"]
    board = EventAccumulator(str(config.run / "lightning" / "tensorboard"))
    board.Reload()
    seen = [(event.step + 1, pytest.approx(event.value)) for event in board.Scalars("loss")]
    steps = [event for event in read_log(config.run) if event["event"] == "step"]
    assert [(event["step"], event["loss"]) for event in steps] == seen
    last = [event for event in read_log(config.run) if event["event"] == "eval"][-1]
    assert board.Scalars("valid_loss")[-1].value == pytest.approx(last["loss"])
    text = (config.run / "lightning" / "csv" / "metrics.csv").read_text()
    assert len(text.splitlines()) > len(steps) and "valid_loss" in text.splitlines()[0]


@pytest.mark.parametrize("strategy", ["dp", "pipeline_1f1b", "nonsense"])
def test_a_strategy_that_lightning_does_not_have_is_named(config, strategy):
    with pytest.raises(UserError, match=f"--strategy {strategy}.*single, ddp, fsdp"):
        lit.fit(config.replace(strategy=strategy))


def test_nothing_to_resume_is_one_clear_line(config):
    with pytest.raises(UserError, match=r"last.ckpt is not there: nothing to resume"):
        lit.fit(config.replace(resume=True))


def test_a_new_run_sets_the_old_one_aside(config):
    for width in (2, 3):
        lit.fit(config.replace(max_steps=1, width=width))
    weights = [checkpoint.load(config.run / f"checkpoint.pt{end}")["config"]["width"] for end in ("", ".previous")]
    assert weights == [3, 2] and (config.run / "lightning.previous" / "last.ckpt").exists()


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS": "4"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    "variables, nodes, here, kind",
    [
        ({}, 1, 3, "LightningEnvironment"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, 2, 2, "SLURMEnvironment"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, 1, 3, "LightningEnvironment"),  # a notebook that is a job itself
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4", "TORCHELASTIC_RUN_ID": "7"}, 2, 2, "SLURMEnvironment"),  # slurm/site.sh
        (SLURM | TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}, 2, 2, "TorchElasticEnvironment"),
    ],
)
def test_who_has_started_the_ranks_is_seen(config, monkeypatch, variables, nodes, here, kind):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = settings(config.replace(strategy="ddp", devices=3, device="cpu"))
    assert (found["num_nodes"], found["devices"], type(found["plugins"][0]).__name__) == (nodes, here, kind)
