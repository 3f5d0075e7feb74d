"""On 1,024 ranks that are not there: what DDP, FSDP2 and HSDP send equals the closed formulas, to the byte."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import simulate
from course_lib.config import UserError
from course_lib.simulate import Message
from course_lib.unet import UNet

X = torch.zeros(1, 1, 16, 16)


def make(width: int = 8, depth: int = 2) -> UNet:
    return UNet(1, 1, width=width, depth=depth)


@pytest.mark.parametrize("ranks", [2, 3, 8, 100, 1024])
@pytest.mark.parametrize("width, depth", [(8, 2), (5, 1), (16, 3)])
def test_ddp_sends_twice_the_gradients(ranks, width, depth):
    found = simulate.count("ddp", lambda: make(width, depth), X, ranks=ranks)
    size = sum(parameter.nbytes for parameter in make(width, depth).parameters())
    assert found.sent == simulate.ddp_bytes(make(width, depth), ranks) == 2 * (ranks - 1) / ranks * size
    assert dict(found.calls) == {"all-reduce": 1}


@pytest.mark.parametrize("ranks", [2, 3, 8, 100, 1024])
@pytest.mark.parametrize("width, depth", [(8, 2), (5, 1), (16, 3)])
def test_fsdp_gathers_twice_and_scatters_once(ranks, width, depth):
    found = simulate.count("fsdp", lambda: make(width, depth), X, ranks=ranks)
    blocks = 2 * depth + 1
    assert found.sent == pytest.approx(simulate.fsdp_bytes(make(width, depth), ranks), rel=1e-12)
    assert dict(found.calls) == {"all-gather": 2 * blocks + 1, "reduce-scatter": blocks + 1}  # the head's stays


@pytest.mark.parametrize("ranks, inside", [(16, 8), (1024, 8), (12, 4), (1024, 64)])
def test_hsdp_is_fsdp_inside_and_an_all_reduce_of_a_piece_across(ranks, inside):
    found = simulate.count("hsdp", make, X, ranks=ranks, inside=inside)
    assert found.sent == pytest.approx(simulate.hsdp_bytes(make(), ranks, inside), rel=1e-12)
    assert found.calls["all-reduce"] == found.calls["reduce-scatter"] == 6
    assert {m.ranks for m in found.messages} == {inside, ranks // inside}


def test_without_padding_fsdp_sends_one_and_a_half_times_as_much_as_ddp():
    """On 2 ranks every first dimension divides, but that of the head with its single row."""
    net = make()
    ratio = simulate.fsdp_bytes(net, 2) / simulate.ddp_bytes(net, 2)
    assert ratio == pytest.approx(1.5, rel=1e-3)


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(1, 64))
def test_padding_fills_up_to_equal_pieces(rows, ranks):
    layer = torch.nn.Linear(3, rows, bias=False)
    filled = simulate.padded(layer, ranks) // (4 * 3)
    assert filled % ranks == 0 and rows <= filled < rows + ranks


def test_small_buckets_are_more_messages_of_the_same_bytes():
    found = [simulate.count("ddp", make, X, ranks=64, bucket_mb=megabytes) for megabytes in (25.0, 0.05, 0.01)]
    assert [one.sent for one in found] == pytest.approx([simulate.ddp_bytes(make(), 64)] * 3, rel=1e-12)
    one, few, many = (traffic.calls["all-reduce"] for traffic in found)
    assert 1 == one < few < many <= len(list(make().parameters()))


def test_what_a_rank_sends():
    assert Message("all-reduce", 1000, 4).sent == 1500
    assert Message("all-gather", 1000, 4).sent == Message("reduce-scatter", 1000, 4).sent == 750
    assert Message("all-reduce", 1000, 1).sent == 0


def test_no_group_is_left_behind_even_after_an_error():
    def broken() -> UNet:
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        simulate.count("ddp", broken, X, ranks=8)
    assert not dist.is_initialized()


def test_mistakes_are_named():
    with pytest.raises(UserError, match="knows ddp, fsdp, hsdp, not 'zero'"):
        simulate.count("zero", make, X, ranks=8)
    with pytest.raises(UserError, match="12 ranks can't be divided into groups of 8"):
        simulate.count("hsdp", make, X, ranks=12)
    with (
        simulate.fake_world(4),
        pytest.raises(UserError, match="a rank already"),
    ):
        simulate.count("ddp", make, X, ranks=8)
