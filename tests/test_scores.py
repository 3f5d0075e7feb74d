"""A score is the same however the samples are batched and however many ranks share them; IoU is torchmetrics' own."""

import re

import pytest
import torch
from helpers import torchrun
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torchmetrics.classification import BinaryJaccardIndex

from course_lib.data.batches import shard
from course_lib.scores import Overlap
from course_lib.trainer import evaluate
from course_lib.world import World


def masks(samples: int, seed: int, density: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, 1, 6, 5, generator=generator)
    return logits, (torch.rand(logits.shape, generator=generator) < density).float()


def batched(logits, target, numbers: list[list[int]]):
    return [(logits[batch], target[batch]) for batch in numbers]


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_iou_is_torchmetrics_own_however_it_is_batched(samples, size, seed, density):
    logits, target = masks(samples, seed, density)
    found = evaluate(lambda x: x, batched(logits, target, shard(samples, size)), score=Overlap())
    expected = BinaryJaccardIndex()(logits.sigmoid(), target.int())
    assert found["iou"] == pytest.approx(float(expected), abs=1e-6) and found["count"] == samples
    assert found["loss"] == pytest.approx(float(Overlap.loss(logits, target)), rel=1e-5)


@given(st.integers(1, 6), st.integers(6, 30), st.integers(1, 5), st.integers(0, 10**6))
def test_iou_does_not_depend_on_the_number_of_ranks(ranks, samples, size, seed):
    logits, target = masks(samples, seed)
    score = Overlap()
    shares = [shard(samples, size, World(rank=rank, world_size=ranks)) for rank in range(ranks)]
    sums = [sum(score.sums(x, y) for x, y in batched(logits, target, share)) for share in shares]
    whole = score.result(score.sums(logits, target).tolist())
    together = score.result(sum(sums).tolist())
    assert together["iou"] == whole["iou"] and together["count"] == samples
    assert together["loss"] == pytest.approx(whole["loss"], rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_iou_on_real_ranks(ranks, tmp_path):
    """Seven uneven samples: every rank gets the same number, and it is torchmetrics'."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from test_scores import *\n"
        "from course_lib.config import Config\n"
        "from course_lib.world import start, stop\n"
        "world = start(Config(timeout=60))\n"
        "logits, target = masks(7, 5)\n"
        "batches = batched(logits, target, shard(7, 2, world))\n"
        "print(f\"<{evaluate(lambda x: x, batches, world, score=Overlap())['iou']}>\")\n"
        "stop(world)\n"
    )
    code, output = torchrun(ranks, program, __file__.rpartition("/")[0])
    assert code == 0, output
    logits, target = masks(7, 5)
    expected = float(BinaryJaccardIndex()(logits.sigmoid(), target.int()))
    found = [float(value) for value in re.findall(r"<([\d.]+)>", output)]  # two ranks may print into one line
    assert found == pytest.approx([expected] * ranks, abs=1e-7)


def test_nothing_anywhere_is_perfect_and_something_invented_is_not():
    empty = torch.zeros(1, 1, 4, 4)
    assert Overlap().result(Overlap().sums(empty - 1, empty).tolist())["iou"] == 1.0
    assert Overlap().result(Overlap().sums(empty + 1, empty).tolist())["iou"] == 0.0


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_the_loss_of_equal_parts_averages_to_that_of_the_whole_and_so_do_gradients(parts):
    """Dice of a whole batch would fail this: ranks would not train what one process trains."""
    logits, target = masks(6, 1)
    whole = logits.clone().double().requires_grad_()
    Overlap.loss(whole, target.double()).backward()
    split = logits.clone().double().requires_grad_()
    pieces = zip(split.chunk(parts), target.double().chunk(parts))
    losses = torch.stack([Overlap.loss(x, y) for x, y in pieces])
    losses.mean().backward()
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-12, atol=0)


def test_the_loss_by_hand():
    """One pixel: BCE is −ln σ(x), Dice (2σ + 1)/(σ + 2)."""
    x = torch.tensor([[[[0.7]]]])
    inside = torch.sigmoid(x).item()
    expected = F.softplus(-x).item() + 1 - (2 * inside + 1) / (inside + 2)
    assert float(Overlap.loss(x, torch.ones(1, 1, 1, 1))) == pytest.approx(expected, rel=1e-6)
