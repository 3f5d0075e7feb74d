"""A model cut anywhere gives the same bits as the whole, and the cut falls where the dearest stage is cheapest."""

import itertools

import pytest
import torch
from helpers import assert_same, result
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from course_lib.config import UserError
from course_lib.parallel.split import Split, find_cuts, measure_costs, pieces, split
from course_lib.trainer import fit
from course_lib.unet import UNet


def make(depth: int, **options) -> UNet:
    torch.manual_seed(0)
    net = UNet(3, 2, width=4, depth=depth, **options).double()
    nn.init.normal_(net.head.weight)
    return net


def run(stages, x: torch.Tensor) -> torch.Tensor:
    state = (x,)
    for stage in stages:
        state = stage(*state)
        state = state if isinstance(state, tuple) else (state,)
    assert len(state) == 1
    return state[0]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_cut_anywhere_it_is_the_whole_to_the_last_bit(depth, checkpointing, residual):
    net = make(depth, residual=residual, checkpointing=checkpointing)
    x = torch.randn(2, 3, 21, 17, dtype=torch.float64)  # odd sizes
    whole = net(x)
    gradients = torch.autograd.grad(whole.square().sum(), list(net.parameters()))
    count = len(pieces(net))
    assert count == 2 * depth + 2
    for cuts in (cuts for n in (1, 2) for cuts in itertools.combinations(range(1, count), n)):
        stages = split(net, cuts=cuts)
        found = run(stages, x)
        assert torch.equal(found, whole), cuts
        again = torch.autograd.grad(found.square().sum(), list(net.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(again, gradients)), cuts


def test_nothing_is_copied_and_nothing_is_left_out():
    net = make(2, residual=True)
    stages = split(net, 3)
    found = [parameter for stage in stages for parameter in stage.parameters()]
    assert {id(p) for p in found} == {id(p) for p in net.parameters()} and len(found) == len(list(net.parameters()))


def test_blocks_in_a_row_are_split_by_the_same_function():
    """As an EfficientNet is: a chain without skips from one end to the other."""
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.SiLU()) for _ in range(5)), nn.Flatten())
    x = torch.randn(2, 3, 8, 8)
    for stages in (split(net, 2), split(net, cuts=[4]), split(net, 6)):
        assert torch.equal(run(stages, x), net(x))


def test_skips_cross_the_cut():
    """Behind the way down of a depth of 3: the activation, three skips, and the image if it is added at the end."""
    x = torch.zeros(1, 3, 16, 16, dtype=torch.float64)
    for residual in (False, True):
        state = split(make(3, residual=residual), cuts=[3])[0](x)
        assert [t.shape[1] for t in state] == [16, 16, 8, 4, *([3] if residual else [])]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_cheaper_dearest_stage(costs, data):
    stages = data.draw(st.integers(1, len(costs)))

    def dearest(cuts) -> int:
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in zip(edges, edges[1:]))

    found = find_cuts(costs, stages)
    assert len(found) == stages - 1 and found == sorted(set(found))
    assert dearest(found) == min(dearest(cuts) for cuts in itertools.combinations(range(1, len(costs)), stages - 1))


def test_measured_costs_move_the_cut():
    net = make(2)
    assert len(split(net, 2, costs=[9, 1, 1, 1, 1, 1])[0].parts) == 1
    assert len(split(net, 2, costs=[1, 1, 1, 1, 1, 9])[0].parts) == 5


def test_the_heaviest_piece_is_the_dearest_and_measuring_leaves_nothing_behind():
    """A thousand times the work of its neighbours: no noise makes up for that."""
    parts = pieces(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 128, 9), nn.Conv2d(128, 2, 1), nn.ReLU()))
    x = torch.randn(2, 2, 40, 40)
    before = [parameter.detach().clone() for part in parts for parameter in part.parameters()]
    costs = measure_costs(parts, x, repeats=3)
    assert len(costs) == 4 and min(costs) > 0 and costs[1] == max(costs)
    after = [parameter for part in parts for parameter in part.parameters()]
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(after, before))
    assert x.grad is None and not x.requires_grad


def test_over_devices_it_trains_like_the_whole():
    """Two devices that are both this CPU: the state is handed over all the same."""
    x, y = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.randn(4, 2, 16, 16, dtype=torch.float64)
    nets = [make(2), Split(make(2), ["cpu", "cpu"])]
    for net in nets:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
    assert torch.equal(nets[0](x), nets[1](x))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_trainer_ends_with_the_same_bits(devices, config, alone):
    config = config.replace(max_steps=4)
    fit(config.replace(name="whole"))
    fit(config.replace(name="split", strategy="split", devices=devices))
    assert_same(*(result(config.replace(name=name)) for name in ("whole", "split")))


@pytest.mark.parametrize("cuts", [[0], [6], [7], [3, 3], [4, 2], [-1]])
def test_a_cut_that_is_not_there_is_refused(cuts):
    with pytest.raises(UserError, match=r"cuts .* are not there: 6 pieces can be cut after 1 to 5"):
        split(make(2), cuts=cuts)


def test_too_many_stages_and_unknown_models_are_refused():
    with pytest.raises(UserError, match=r"^6 pieces can't make 7 stages; use at most 6 \(--devices, .* \(--depth\)$"):
        split(make(2), 7)
    with pytest.raises(UserError, match="Linear is neither a UNet nor an nn.Sequential"):
        split(nn.Linear(2, 2), 2)
