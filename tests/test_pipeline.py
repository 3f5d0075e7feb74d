"""Every schedule of every cut gives the gradients of the whole, on real ranks; the bubble is what the formula says."""

from pathlib import Path

import pytest
import torch
from helpers import torchrun

from course_lib import simulate
from course_lib.config import UserError
from course_lib.parallel.pipeline import GPipe, bubble, crossings, torch_schedule
from course_lib.parallel.split import split
from course_lib.unet import UNet


@pytest.mark.parametrize("ranks", [2, 4])
def test_pipelines_equal_the_whole_on_real_ranks(ranks):
    """By hand and torch's GPipe and 1F1B, UNets with and without residual, recomputing or not, blocks in a row; copies."""
    code, output = torchrun(ranks, Path(__file__).parent / "on_stages.py")
    assert code == 0, output
    assert output.count("35 pipelines equal the whole, and so do two copies") == ranks


def test_the_formula_by_hand():
    assert bubble(2, 1) == 0.5 and bubble(4, 12) == 0.2 and bubble(1, 5) == 0


def test_mistakes_are_named():
    net, x = UNet(3, 2, width=4, depth=2), torch.zeros(6, 3, 16, 16)
    with simulate.fake_world(2):
        with pytest.raises(UserError, match="3 stages need 3 ranks, and there are 2"):
            GPipe(split(net, 3), x, micro_batches=2)
        with pytest.raises(UserError, match="a batch of 6 can't be cut into 4 micro-batches of equal size"):
            GPipe(split(net, 2), x, micro_batches=4)
        with pytest.raises(UserError, match="1F1B over 2 stages needs at least as many micro-batches, not 1"):
            torch_schedule("1f1b", split(net, 2), x, micro_batches=1, measure=torch.nn.functional.mse_loss)


def test_shapes_are_known_before_anything_is_computed():
    """And which of the tensors will get a gradient: the image that is only passed on does not."""
    net = UNet(3, 2, width=4, depth=2, residual=True)
    x = torch.randn(2, 3, 21, 17)
    stages = split(net, cuts=[2])
    entering, between, leaving = crossings(stages, x)
    assert [one.shape for one in between] == [tuple(t.shape) for t in stages[0](x)]
    assert [one.learns for one in between] == [True, True, True, False]
    assert [one.shape for one in entering + leaving] == [(2, 3, 21, 17), (2, 2, 21, 17)]
    assert all(one.dtype == torch.float32 for one in between)
