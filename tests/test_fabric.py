"""Fabric == our own loop, whoever starts the ranks; and what it makes of DP where there is no GPU."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_same, environment, result, torchrun
from lightning.fabric import Fabric

from course_lib import fabric, trainer
from course_lib.config import UserError


@pytest.fixture(autouse=True)
def _alone(alone):
    """Nobody has started these tests but pytest."""


@pytest.fixture(scope="module")
def on_two_ranks(base):
    """Two epochs of six steps on two ranks, started by torchrun and by Fabric itself."""
    config = base.replace(epochs=2, bucket_mb=5e-4, timeout=60, strategy="ddp")
    runs = {name: config.replace(name=f"fabric-{name}") for name in ("torchrun", "itself")}

    def run(name: str) -> tuple[int, str]:
        words = ["-m", "course_lib.fabric", *runs[name].arguments()]
        if name == "torchrun":
            return torchrun(2, *words)
        done = subprocess.run(
            [sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=240, check=False
        )
        return done.returncode, done.stdout + done.stderr

    with ThreadPoolExecutor() as threads:
        for code, output in threads.map(run, runs):
            assert code == 0 and output.count("done: ") == 1, output
    return runs


@pytest.mark.parametrize("name", ["torchrun", "itself"])
def test_on_ranks_it_is_our_ddp_to_the_last_bit(on_two_ranks, trained, name):
    assert_same(result(on_two_ranks[name]), result(trained["ddp"]))


def test_alone_it_is_our_loop_to_the_last_bit(config, base):
    config, other = config.replace(max_steps=5), base.replace(name="fabric-alone", max_steps=5)
    _, world = fabric.fit(config)
    trainer.fit(other)
    assert world.world_size == 1
    assert_same(result(config), result(other))


def test_dp_on_threads_is_one_device_to_rounding(config, base):
    config, other = config.replace(strategy="dp", max_steps=5), base.replace(name="fabric-single", max_steps=5)
    _, world = fabric.fit(config)
    trainer.fit(other)
    assert world.world_size == 1
    torch.testing.assert_close(result(config)["model"], result(other)["model"], rtol=1e-5, atol=1e-6)


def test_fabrics_own_dp_is_ddp_where_there_is_no_gpu():
    """The reason why ours is not left to it."""
    made = Fabric(accelerator="cpu", devices=2, strategy="dp")
    assert type(made.strategy).__name__ == "DDPStrategy"


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline_1f1b", "nonsense"])
def test_a_strategy_that_fabric_does_not_have_is_named(config, strategy):
    with pytest.raises(UserError, match=f"--strategy {strategy}.*single, dp, ddp"):
        fabric.fit(config.replace(strategy=strategy))
