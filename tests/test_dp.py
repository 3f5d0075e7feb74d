"""DataParallel on threads == one device: outputs, gradients, weights, buffers; and it fails as loudly.

In float64, so that only the order of a sum may differ: rtol 1e-9 and atol 1e-12, where nothing else is said.
"""

import copy
import gc
import threading

import pytest
import torch
from helpers import assert_same, result, wait_until
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from course_lib.config import Config, UserError
from course_lib.parallel import data_parallel, find_strategy
from course_lib.parallel.dp import DataParallel, gather, reduce, scatter
from course_lib.timeline import Timeline
from course_lib.trainer import fit, train_step
from course_lib.unet import UNet
from course_lib.world import World

DEVICES = [1, 2, 3, 4]
pytestmark = pytest.mark.usefixtures("alone")


def make_net(**options) -> UNet:
    torch.manual_seed(1)
    return UNet(3, 2, width=2, depth=1, padding="circular", **options).double()


def make_batch(samples: int, size: tuple[int, int] = (7, 9), *, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    return torch.randn(samples, 3, *size, **options), torch.randn(samples, 2, *size, **options)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def pair(model: nn.Module, devices: int) -> tuple[nn.Module, DataParallel]:
    """The same net twice: on one device, and spread over several."""
    return model, DataParallel(copy.deepcopy(model), devices)


# ---- DataParallel == one device --------------------------------------------------------------------------------------------


@given(st.sampled_from(DEVICES), st.integers(1, 9), st.integers(4, 9), st.integers(4, 9))
def test_outputs_and_every_gradient_are_those_of_one_device(devices, samples, height, width):
    """Batches that no number of devices divides, batches smaller than the devices, images of odd sizes."""
    one, many = pair(make_net(), devices)
    x, y = make_batch(samples, (height, width))
    outputs = [net(x) for net in (one, many)]
    for output in outputs:
        F.mse_loss(output, y).backward()
    assert_close(outputs[1], outputs[0])
    assert_close(gradients(many.module), gradients(one))
    assert all(gradient is not None for gradient in gradients(many.module).values())


@pytest.mark.parametrize("devices", DEVICES)
def test_weights_after_several_steps_are_those_of_one_device(devices):
    one, many = pair(make_net(), devices)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (one, many)]
    for step, samples in enumerate([8, 5, 1, 2, 7, 3]):
        batch = make_batch(samples, seed=step)
        losses = [train_step(net, batch, optimizer) for net, optimizer in zip((one, many), optimizers)]
        assert_close(losses[1], losses[0])
    torch.testing.assert_close(
        many.module.state_dict(), one.state_dict(), rtol=1e-7, atol=1e-9
    )  # Adam divides by small
    assert not torch.equal(one.head.weight, make_net().head.weight)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("samples", [1, 5])
def test_an_input_that_requires_a_gradient_gets_it(devices, samples):
    """As in a net before this one, whose learning depends on it."""
    one, many = pair(make_net(), devices)
    x, y = make_batch(samples)
    found = []
    for net in (one, many):
        leaf = x.clone().requires_grad_()
        F.mse_loss(net(2 * leaf), y).backward()
        found.append(leaf.grad)
    assert found[0].abs().sum() > 0
    assert_close(found[1], found[0])
    assert_close(gradients(many.module), gradients(one))


@pytest.mark.parametrize("devices", DEVICES)
def test_without_gradients_there_is_no_graph(devices):
    one, many = pair(make_net(norm="batch"), devices)
    x, _ = make_batch(5)
    assert many.eval().module.training is False
    with torch.no_grad():
        output = many(x)
    assert not output.requires_grad and output.grad_fn is None
    assert_close(output, one.eval()(x).detach())  # evaluation by BatchNorm's averages: no matter how the batch is split
    with torch.inference_mode():
        assert_close(many(x).clone(), output)
    assert many(x).requires_grad  # in evaluation too, when nobody forbids it


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("frozen_first", [True, False])
def test_frozen_parameters_get_no_gradient(devices, frozen_first):
    """Whether they were frozen before the net was wrapped or later, and when they thaw again."""
    one, many = make_net(), None
    if frozen_first:
        one.down.requires_grad_(False)
    one, many = pair(one, devices)
    for net in (one, many.module):
        net.down.requires_grad_(False)
    x, y = make_batch(5)
    for net in (one, many):
        F.mse_loss(net(x), y).backward()
    assert {name for name, gradient in gradients(many.module).items() if gradient is None} == {
        name for name, _ in one.named_parameters() if name.startswith("down.")
    }
    assert_close(gradients(many.module), gradients(one))
    for net in (one, many.module):
        net.requires_grad_(True)
        net.zero_grad()
    for net in (one, many):
        F.mse_loss(net(x), y).backward()
    assert_close(gradients(many.module), gradients(one))


def test_all_parameters_frozen_but_the_input_learns():
    one, many = pair(make_net().requires_grad_(False), 2)
    x, _ = make_batch(3)
    assert not many(x).requires_grad
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for net, leaf in zip((one, many), leaves):
        net(leaf).square().sum().backward()
    assert_close(leaves[1].grad, leaves[0].grad)


class Choosy(nn.Module):
    """One layer for all, one for samples that begin with a positive number, one for nobody."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0] > 0
        y = self.always(x)
        return y + chosen[:, None] * self.sometimes(x) if chosen.any() else y


@pytest.mark.parametrize("devices", DEVICES)
def test_unused_parameters_have_no_gradient_and_half_used_ones_have_theirs(devices):
    one, many = pair(Choosy(), devices)
    x = torch.randn(6, 3, dtype=torch.float64)
    x[:, 0] = torch.tensor([-1, -1, -1, -1, -1, 1])  # only the last device finds a use for it
    for net in (one, many):
        net(x).square().mean().backward()
    assert_close(gradients(many.module), gradients(one))
    assert many.module.never.weight.grad is None and many.module.sometimes.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("devices", DEVICES)
def test_two_forwards_before_one_backward(devices):
    one, many = pair(make_net(), devices)
    (a, y), (b, _) = make_batch(5), make_batch(3, seed=4)
    for net in (one, many):
        (F.mse_loss(net(a), y) + net(b).square().mean()).backward()
    assert_close(gradients(many.module), gradients(one))


@pytest.mark.parametrize("devices", DEVICES)
def test_gradients_add_up_over_backward_passes(devices):
    one, many = pair(make_net(), devices)
    for seed in range(3):
        x, y = make_batch(4, seed=seed)
        for net in (one, many):
            F.mse_loss(net(x), y).backward()
    assert_close(gradients(many.module), gradients(one))


def test_recomputed_activations_are_fine():
    one, many = pair(make_net(checkpointing=True), 2)
    x, y = make_batch(5)
    for net in (one, many):
        F.mse_loss(net(x), y).backward()
    assert_close(gradients(many.module), gradients(one))


def test_it_is_deterministic_to_the_last_bit():
    def train() -> dict:
        many = DataParallel(make_net(), 3)
        optimizer = torch.optim.Adam(many.parameters(), lr=1e-2)
        losses = [train_step(many, make_batch(7, seed=step), optimizer) for step in range(4)]
        return {"losses": losses, "weights": many.state_dict()}

    first = train()
    for _ in range(4):
        assert_same(train(), first)


# ---- BatchNorm: per device, and device 0's averages are kept ---------------------------------------------------------------


@pytest.mark.parametrize("devices", DEVICES)
def test_the_modules_own_buffers_are_updated_as_by_device_0(devices):
    """nn.DataParallel does the same: what the other devices saw of the batch's statistics is lost."""
    one, many = pair(make_net(norm="batch"), devices)
    before = copy.deepcopy(dict(many.module.named_buffers()))
    for step in range(3):
        x, _ = make_batch(8, seed=step)
        many(x)
        one(scatter(x, devices)[0])
    assert_close(dict(many.module.named_buffers()), dict(one.named_buffers()))
    assert not any(torch.equal(buffer, before[name]) for name, buffer in many.module.named_buffers())
    kept = copy.deepcopy(dict(many.module.named_buffers()))
    many.eval()(make_batch(8)[0])
    assert_same(dict(many.module.named_buffers()), kept)  # evaluation changes nothing


def assert_equal_to_its_pieces(one: nn.Module, many: DataParallel) -> None:
    """One device that takes the pieces of a batch one after the other gives the same outputs and gradients."""
    x, y = make_batch(8)
    outputs = [torch.cat([one(piece) for piece in scatter(x, many.devices)]), many(x)]
    for output in outputs:
        F.mse_loss(output, y).backward()
    assert_close(outputs[1], outputs[0])
    assert_close(gradients(many.module), gradients(one))


@pytest.mark.parametrize("devices", DEVICES)
def test_batch_norm_looks_at_one_device_at_a_time(devices):
    """Its gradients are those of the pieces, one after the other, and so not those of one device with the whole batch."""
    assert_equal_to_its_pieces(*pair(make_net(norm="batch"), devices))


@pytest.mark.parametrize("devices", DEVICES)
def test_a_part_that_evaluates_while_the_rest_trains_does_so_on_every_device(devices):
    """As when a trained net is fine-tuned: its first layers keep their averages."""
    one, many = pair(make_net(norm="batch"), devices)
    for net in (one, many.module):
        net.down[0].layers[1].running_mean += 1
        net.train()
        net.down.eval()
    assert_equal_to_its_pieces(one, many)


# ---- it is the module and nothing more -------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", DEVICES)
def test_parameters_and_state_are_the_modules_own(devices):
    net = make_net(norm="batch")
    many = DataParallel(net, devices)
    assert [id(parameter) for parameter in many.parameters()] == [id(parameter) for parameter in net.parameters()]
    assert [id(buffer) for buffer in many.buffers()] == [id(buffer) for buffer in net.buffers()]
    assert_same(dict(many.state_dict()), {f"module.{name}": value for name, value in net.state_dict().items()})


@pytest.mark.parametrize("devices", DEVICES)
def test_weights_loaded_later_count_on_every_device(devices):
    many = DataParallel(make_net(), devices)
    torch.manual_seed(9)
    other = UNet(3, 2, width=2, depth=1, padding="circular").double()
    many.module.load_state_dict(other.state_dict())
    x, _ = make_batch(8)
    assert_close(many(x), other(x))


def test_no_thread_outlives_it():
    def device_threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("device")]

    gc.collect()
    wait_until(lambda: not device_threads())
    many = DataParallel(make_net(), 3)
    many(make_batch(8)[0]).sum().backward()
    assert len(device_threads()) == 3
    del many
    gc.collect()
    wait_until(lambda: not device_threads())


# ---- the steps themselves --------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 20))
def test_scatter_and_gather_are_inverse(devices, samples):
    x = torch.arange(samples * 2.0).reshape(samples, 2)
    pieces = scatter(x, devices)
    sizes = [len(piece) for piece in pieces]
    assert len(pieces) == min(devices, samples) and max(sizes) - min(sizes) <= 1
    assert_same(gather(pieces), x)


def test_reduce_adds_up_what_was_found():
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert_same(reduce([[one, None, None], [two, two, None], [two, None, None]]), [torch.full((2,), 5.0), two, None])
    assert_same([one, two], [torch.ones(2), torch.full((2,), 2.0)])  # and changed none of it


def test_every_step_is_on_the_timeline():
    timeline = Timeline()
    many = DataParallel(make_net(), 2, timeline)
    many(make_batch(4)[0]).sum().backward()
    kinds = [span.kind for span in timeline.spans]
    assert kinds == ["scatter", "replicate", "apply", "gather", "scatter", "apply", "reduce"]


# ---- failures --------------------------------------------------------------------------------------------------------------


class Picky(nn.Module):
    """Fails on a sample with a 13 in it, or in the backward pass of one with a 14."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 13).any():
            raise ValueError(f"no 13, please: {len(x)} samples")
        y = self.layer(x)
        if (x == 14).any():
            y.register_hook(self.refuse)
        return y

    @staticmethod
    def refuse(gradient: torch.Tensor):
        raise ArithmeticError("no 14, please")


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("at", [0, -1])
def test_an_exception_on_one_device_surfaces_in_its_own_words(devices, at):
    many = DataParallel(Picky(), devices)
    good, bad, late = (torch.zeros(12, 2) for _ in range(3))
    bad[at], late[at] = 13, 14
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^no 13, please: {12 // devices} samples$"):
            many(bad)
        with pytest.raises(ArithmeticError, match="^no 14, please$"):
            many(late).sum().backward()
        many(good).sum().backward()  # the threads are still there


def test_an_image_that_is_too_small_is_named():
    with pytest.raises(ValueError, match=r"an image of \(1, 4\) can't be halved 1 times"):
        DataParallel(make_net(), 2)(make_batch(4, (1, 4))[0])


# ---- as a strategy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3])
def test_a_run_with_dp_is_a_run_on_one_device(config, devices):
    """Within rtol 1e-4 and atol 1e-5 after 12 steps in float32: the same sums, added up in another order."""
    one, many = (config.replace(name=name, strategy=name, devices=devices, epochs=1) for name in ("single", "dp"))
    for each in (one, many):
        fit(each)
    a, b = result(one), result(many)
    assert a["position"] == b["position"] == {"step": 12, "epoch": 0, "seen": 48}
    torch.testing.assert_close(b["model"], a["model"], rtol=1e-4, atol=1e-5)
    for x, y in zip(a["log"], b["log"], strict=True):
        assert y["loss"] == pytest.approx(x["loss"], rel=1e-5)


def test_the_strategy_takes_the_devices_it_is_told():
    wrapped, _ = data_parallel(make_net(), World(), Config(devices=3))
    assert isinstance(wrapped, DataParallel) and len(wrapped.replicas) == 3


def test_dp_is_for_one_rank():
    with pytest.raises(UserError, match="^--strategy dp is for one rank, and 2 were started; try --strategy ddp$"):
        find_strategy("dp", World(world_size=2))


@pytest.mark.parametrize("devices", [0, -1])
def test_there_must_be_a_device(devices):
    with pytest.raises(UserError, match=f"^--devices must be at least 1, not {devices}$"):
        Config(devices=devices)
