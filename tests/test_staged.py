"""Strategies that share a model over ranks train what one process trains, by the real trainer, and resume to the same bits."""

from pathlib import Path

import pytest
import torch
from helpers import result, torchrun

from course_lib import checkpoint, simulate
from course_lib.config import UserError
from course_lib.data.tasks import make_task
from course_lib.parallel import SHARED
from course_lib.parallel.staged import Pipeline, world_of_data
from course_lib.trainer import fit, make_model
from course_lib.world import World

STAGED = Path(__file__).parent / "on_staged.py"
RUNS = {2: [*SHARED, "fsdp"], 4: ["hybrid", "hsdp", "tp"]}
RUNS[2].remove("hybrid")


@pytest.fixture(scope="session")
def shared(base):
    """Six steps of every strategy, each twice: without a stop and with one. → {strategy: (config, config of one process)}"""
    config = base.replace(max_steps=6, timeout=60, checkpoint_every=4)
    alone = {copies: config.replace(name=f"alone-{copies}", global_batch=4 * copies) for copies in (1, 2, 4)}
    for one in alone.values():
        fit(one)
    found = {}
    for ranks, names in RUNS.items():
        folder = config.replace(runs=f"{config.runs}/on-{ranks}")
        code, output = torchrun(ranks, STAGED, ",".join(names), *folder.arguments())
        assert code == 0, output
        assert output.count("resumed to the same bits") == len(names)
        for name in names:
            copies = {"hybrid": 2, "fsdp": ranks, "hsdp": ranks}.get(name, 1)
            found[f"{name} on {ranks}"] = folder.replace(name=f"{name}-whole", strategy=name), alone[copies]
    return found


CASES = [f"{name} on {ranks}" for ranks, names in RUNS.items() for name in names]


@pytest.mark.parametrize("case", CASES)
def test_it_trains_what_one_process_trains(case, shared):
    config, alone = shared[case]
    mine, theirs = (checkpoint.load(one.run / "checkpoint.pt") for one in (config, alone))
    assert list(mine["model"]) == list(theirs["model"]) and mine["position"] == theirs["position"]
    for name, tensor in theirs["model"].items():
        # a tenth of one of Adam's steps: where a gradient is nearly zero, it makes a step of its rounding
        torch.testing.assert_close(mine["model"][name], tensor, rtol=1e-3, atol=0.1 * config.lr, msg=name)
    losses = [[event["loss"] for event in result(one)["log"] if "count" in event] for one in (config, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_every_sample_is_judged_once(case, shared):
    config, alone = shared[case]
    counts = [[event["count"] for event in result(one)["log"] if "count" in event] for one in (config, alone)]
    assert counts[0] == counts[1] and set(counts[0]) == {25}


@pytest.mark.parametrize("case", CASES)
def test_its_checkpoint_is_complete_and_one_process_goes_on_from_it(case, shared, tmp_path):
    """Weights and Adam's state of all stages: loading them is enough to go on alone."""
    config, alone = shared[case]
    content = checkpoint.load(config.run / "checkpoint.pt")
    states = content["optimizer"]["state"]
    assert len(states) == len(content["model"]) and all(float(state["step"]) == 6 for state in states.values())
    after = config.replace(runs=str(tmp_path), name="after", strategy="single", resume=True, epochs=3, max_steps=9)
    after.run.mkdir()
    (after.run / "checkpoint.pt").write_bytes((config.run / "checkpoint.pt").read_bytes())
    assert fit(after.replace(batch=alone.global_batch)).metrics["count"] == 25


def test_who_sees_which_data(config):
    ranks = [World(rank=rank, world_size=4) for rank in range(4)]
    seen = {
        name: [world_of_data(config.replace(strategy=name), world) for world in ranks]
        for name in ("ddp", "hybrid", "spatial")
    }
    assert {name: [(w.rank, w.world_size) for w in worlds] for name, worlds in seen.items()} == {
        "ddp": [(0, 4), (1, 4), (2, 4), (3, 4)],
        "hybrid": [(0, 2), (0, 2), (1, 2), (1, 2)],
        "spatial": [(0, 1)] * 4,
    }
    with pytest.raises(UserError, match="3 ranks can't be divided into copies of --devices 2 stages; start 2"):
        world_of_data(config.replace(strategy="hybrid"), World(world_size=3))


@pytest.mark.parametrize(
    "flags, told",
    [
        ({"strategy": "pipeline_naive", "micro_batches": 3}, "--batch 4 can't be cut into --micro-batches 3"),
        ({"strategy": "spatial", "depth": 4}, "images of 16 rows can't be shared by 2 ranks that halve them 4 times"),
    ],
)
def test_mistakes_are_one_line_a_rank_and_exit_code_2(flags, told, config):
    code, output = torchrun(2, "-m", "course_lib.train", *config.replace(**flags).arguments())
    assert code != 0 and told in output and "exitcode  : 2" in output, output
    assert output.count("error: ") >= 1 and "course_lib/trainer.py" not in output  # no rank's traceback


def test_ranks_that_no_stages_fit_are_refused_before_anything_is_written(config):
    """A copy needs --devices ranks; a pipeline needs a piece of the model for every rank."""
    for ranks, strategy, told in [
        (3, "hybrid", "^3 ranks can't be divided into copies of --devices 2 stages; start 2$"),
        (
            5,
            "pipeline_naive",
            r"^4 pieces can't make 5 stages; use at most 4 \(--devices, or the ranks of a pipeline\)",
        ),
    ]:
        with simulate.fake_world(ranks), pytest.raises(UserError, match=told):
            fit(config.replace(strategy=strategy), World(world_size=ranks))
    assert not config.run.exists()


def test_a_pipeline_refuses_batchnorm_and_too_few_micro_batches(config):
    for flags, told in [
        ({"norm": "batch"}, "BatchNorm in a pipeline"),
        ({"micro_batches": 1}, "needs at least as many"),
    ]:
        changed = config.replace(strategy="pipeline_1f1b", **flags)
        with simulate.fake_world(2), pytest.raises(UserError, match=told):
            net = make_model(changed, make_task(changed))
            Pipeline(net, World(world_size=2), changed, schedule="1f1b").forward_backward(
                *(torch.zeros(4, 6, 16, 16),) * 2, torch.nn.functional.mse_loss
            )
