"""The UNet: any size in, the same size out; its formulas of cost hold exactly; its symmetries are real."""

import pytest
import torch
from helpers import assert_same
from torch import nn

from course_lib.unet import UNet, count_activations, count_parameters, measure_activations

SIZES = [(8, 8), (9, 8), (16, 16), (17, 23), (31, 32), (73, 144)]


def make(inputs: int = 2, outputs: int = 2, *, seed: int = 0, **options) -> UNet:
    torch.manual_seed(seed)
    return UNet(inputs, outputs, **{"width": 4, "depth": 2, **options})


def fields(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(model: UNet, x: torch.Tensor) -> list[torch.Tensor]:
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


# ---- shapes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["zeros", "circular"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_the_output_is_as_large_as_the_input(size, depth, padding):
    model = make(3, 2, depth=depth, padding=padding, width=16)
    assert model(fields(2, 3, *size)).shape == (2, 2, *size)


@pytest.mark.parametrize("size", [(3, 16), (16, 3), (1, 1)])
def test_an_image_too_small_to_be_halved_is_refused(size):
    with pytest.raises(ValueError, match="halved 2 times"):
        make()(fields(1, 2, *size))


def test_the_smallest_image_has_one_point_at_the_bottom():
    assert make(width=16)(fields(1, 2, 4, 4)).shape == (1, 2, 4, 4)


# ---- formulas --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
@pytest.mark.parametrize("inputs, outputs, width, depth", [(1, 1, 1, 0), (6, 6, 16, 2), (12, 6, 5, 3), (3, 7, 8, 1)])
def test_parameters_are_as_many_as_the_formula_says(inputs, outputs, width, depth, norm):
    model = UNet(inputs, outputs, width=width, depth=depth, norm=norm)
    predicted = count_parameters(inputs, outputs, width=width, depth=depth, norm=norm)
    assert sum(parameter.numel() for parameter in model.parameters()) == predicted


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "circular"])
@pytest.mark.parametrize("size", [(16, 16), (17, 23), (30, 13)])
@pytest.mark.parametrize("width, depth", [(4, 0), (3, 1), (8, 2), (5, 3)])
def test_activations_take_the_bytes_that_the_formula_says(width, depth, size, padding, checkpointing):
    model = make(3, 2, width=width, depth=depth, padding=padding, checkpointing=checkpointing)
    predicted = count_activations(3, size=size, width=width, depth=depth, padding=padding, checkpointing=checkpointing)
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    statistics = (
        0 if checkpointing else sum(4 * 2 * norm.num_groups for norm in norms)
    )  # a mean and a deviation a group
    for batch in (1, 3):
        measured = measure_activations(model, fields(batch, 3, *size))
        assert measured == batch * (predicted + statistics)


# ---- what must not change the result ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["group", "none"])
@pytest.mark.parametrize("size", [(16, 16), (17, 23)])
def test_checkpointing_gives_the_same_gradients_to_the_last_bit(size, norm):
    x = fields(3, 2, *size)
    kept, recomputed = (gradients(make(norm=norm, checkpointing=on), x) for on in (False, True))
    assert_same(kept, recomputed)


def test_the_memory_layout_changes_nothing():
    model, x = make(), fields(3, 2, 17, 24)
    plain = model(x)
    last = model.to(memory_format=torch.channels_last)(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_on_a_planet_without_edges_a_shifted_input_gives_the_shifted_output(depth):
    x, shift = fields(2, 2, 16, 24), (2**depth, -(2 ** (depth + 1)))

    def error(padding: str, shift: tuple[int, int]) -> float:
        model = make(depth=depth, padding=padding)
        shifted = model(x.roll(shift, dims=(-2, -1)))
        return (shifted - model(x).roll(shift, dims=(-2, -1))).abs().max().item()

    assert error("circular", shift) < 1e-5
    assert error("zeros", shift) > 1e-2  # edges give the place away
    assert error("circular", (1, 0)) > 1e-2  # and so does pooling, within 2**depth


def test_a_residual_net_starts_at_no_change():
    x = fields(2, 4, 17, 24)
    assert torch.equal(make(4, 3, residual=True)(x), x[:, :3])
    assert not torch.equal(make(4, 3)(x), x[:, :3])


def test_a_residual_net_needs_what_it_adds_to():
    with pytest.raises(ValueError, match="not 2 for 3"):
        make(2, 3, residual=True)


@pytest.mark.parametrize("norm, alike", [("group", True), ("none", True), ("batch", False)])
def test_a_batch_equals_its_samples_one_by_one_unless_batch_norm_mixes_them(norm, alike):
    model, x = make(norm=norm), fields(5, 2, 16, 16)
    together, alone = model(x), torch.cat([model(sample[None]) for sample in x])
    assert torch.allclose(together, alone, rtol=1e-4, atol=1e-5) == alike


def test_batch_norm_does_not_mix_samples_in_evaluation():
    model, x = make(norm="batch").eval(), fields(5, 2, 16, 16)
    torch.testing.assert_close(model(x), torch.cat([model(sample[None]) for sample in x]), rtol=1e-4, atol=1e-5)
