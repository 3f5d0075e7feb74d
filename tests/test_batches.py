"""Every rank sees its own part of the same order: split == whole, resumed == uninterrupted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib.config import UserError
from course_lib.data.batches import Batches, shard
from course_lib.world import World


def ranks(world_size: int) -> list[World]:
    return [World(rank=rank, world_size=world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_ranks_share_an_epoch_without_overlap(world_size):
    batches = [list(Batches(103, 4, world=world)) for world in ranks(world_size)]
    seen = [index for mine in batches for batch in mine for index in batch]
    assert (
        {len(mine) for mine in batches}
        == {103 // (4 * world_size)}
        == {len(Batches(103, 4, world=ranks(world_size)[0]))}
    )
    assert {len(batch) for mine in batches for batch in mine} == {4}
    assert len(seen) == len(set(seen)) > 103 - 4 * world_size
    assert set(seen) <= set(range(103))


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 100), st.integers(0, 9), st.integers(0, 9))
def test_a_step_of_many_ranks_is_the_step_of_one_with_a_larger_batch(batch, world_size, more, seed, epoch):
    samples = batch * world_size + more
    whole = list(Batches(samples, batch * world_size, seed=seed, epoch=epoch))
    parts = [list(Batches(samples, batch, seed=seed, epoch=epoch, world=world)) for world in ranks(world_size)]
    assert [sum(step, []) for step in zip(*parts, strict=True)] == whole


def test_the_order_is_shuffled_by_seed_and_epoch_and_by_nothing_else():
    orders = {(seed, epoch): list(Batches(64, 8, seed=seed, epoch=epoch)) for seed in range(3) for epoch in range(3)}
    assert orders == {(seed, epoch): list(Batches(64, 8, seed=seed, epoch=epoch)) for seed, epoch in orders}
    assert len({str(order) for order in orders.values()}) == len(orders)
    assert str(list(range(64))) not in {str(sum(order, [])) for order in orders.values()}


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 60), st.integers(0, 70))
def test_a_resumed_epoch_is_the_tail_of_the_whole_one(batch, world_size, more, done):
    samples = batch * world_size + more
    for world in ranks(world_size):
        whole = Batches(samples, batch, seed=7, epoch=2, world=world)
        steps = min(done, len(whole))
        rest = Batches(samples, batch, seed=7, epoch=2, seen=steps * whole.global_batch, world=world)
        assert list(rest) == list(whole)[steps:]
        assert len(rest) == len(whole) - steps


@given(st.integers(1, 200), st.integers(1, 20), st.integers(1, 8))
def test_evaluation_sees_every_sample_once(samples, batch, world_size):
    world_size = min(samples, world_size)
    batches = [one for world in ranks(world_size) for one in shard(samples, batch, world)]
    assert sorted(sum(batches, [])) == list(range(samples))
    assert all(1 <= len(one) <= batch for one in batches)


@pytest.mark.parametrize("samples, batch, world_size", [(7, 8, 1), (23, 8, 3), (0, 1, 1)])
def test_too_few_samples_for_one_step(samples, batch, world_size):
    with pytest.raises(
        UserError, match=rf"needs {batch * world_size} samples .* only {samples}; use a smaller --batch"
    ):
        Batches(samples, batch, world=World(world_size=world_size))


def test_too_few_samples_to_evaluate():
    with pytest.raises(UserError, match="2 validation samples .* 3 ranks; hold out more years"):
        shard(2, 8, World(world_size=3))
