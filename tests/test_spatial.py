"""A convolution of strips with halos, and a UNet of them, equal the whole on real ranks, borders and gradients included."""

from pathlib import Path

import pytest
import torch
from helpers import torchrun
from torch import nn

from course_lib import simulate
from course_lib.config import UserError
from course_lib.parallel.spatial import Halo, spread, strip
from course_lib.unet import UNet


@pytest.mark.parametrize("ranks", [2, 3])
def test_strips_equal_the_whole_on_real_ranks(ranks):
    """Kernels from 1 × 1 to 7 × 1, both paddings; UNets of several depths after three steps of training."""
    code, output = torchrun(ranks, Path(__file__).parent / "on_strips.py")
    assert code == 0, output
    assert output.count("44 times equal to the whole") == ranks


def test_images_that_can_not_be_shared_are_refused():
    with simulate.fake_world(3):
        assert strip(torch.zeros(1, 1, 12, 5), depth=2).shape == (1, 1, 4, 5)
        with pytest.raises(UserError, match="images of 16 rows can't be shared by 3 ranks .* a multiple of 12"):
            strip(torch.zeros(1, 1, 16, 5), depth=2)
        with pytest.raises(UserError, match="a strip of 1 rows is too small for a halo of 2: use fewer ranks"):
            Halo.apply(torch.zeros(1, 1, 1, 5), 2, None, False)


def test_what_does_not_work_on_strips_is_refused():
    for net in (nn.Conv2d(1, 1, 3, padding=0), nn.Conv2d(1, 1, 3, padding=1, stride=2), nn.Conv2d(1, 1, 3, padding=2)):
        with pytest.raises(UserError, match="must have stride 1 and keep the size of its image"):
            spread(net)
    with pytest.raises(UserError, match="BatchNorm over strips is not supported"):
        spread(UNet(1, 1, norm="batch"))
