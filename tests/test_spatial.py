"""A convolution of strips with halos, and a UNet of them, equal the whole on real ranks, borders and gradients included."""

import re
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


@pytest.mark.parametrize(
    "net",
    [
        nn.Conv2d(1, 1, 3, padding=0),
        nn.Conv2d(1, 1, 3, padding=1, stride=2),
        nn.Conv2d(1, 1, 3, padding=2),
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="replicate"),
        nn.Conv2d(1, 1, 3, padding=2, dilation=2),
        nn.Conv2d(1, 1, 3, padding=1, dilation=2),
        nn.Conv2d(1, 1, 2, padding=1),
        nn.Conv2d(1, 1, 3, padding="same"),
        nn.InstanceNorm2d(1),
        nn.BatchNorm2d(1),
        nn.LayerNorm(5),
        nn.MaxPool2d(3, 1, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.ConvTranspose2d(1, 1, 3, padding=1),
        nn.Dropout(0.5),
        nn.Linear(5, 5),
    ],
    ids=str,
)
def test_what_does_not_work_on_strips_is_refused(net):
    """In one line, which names the layer; and nothing was changed when it is said."""
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), net)
    with pytest.raises(UserError, match=rf"^{re.escape(str(net))} can't work on strips: .*$"):
        spread(model)
    assert type(model[0]) is nn.Conv2d


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("norm", ["group", "none"])
@pytest.mark.parametrize("padding", ["zeros", "circular"])
def test_a_unet_of_what_is_known_is_spread(norm, padding, depth):
    net = spread(UNet(1, 1, depth=depth, norm=norm, padding=padding))
    assert not any(type(module) in (nn.Conv2d, nn.GroupNorm) for module in net.modules())
    with pytest.raises(UserError, match=r"^BatchNorm2d\(.* GroupNorm \(--norm group\) and simple activations can$"):
        spread(UNet(1, 1, norm="batch"))
