"""Which rank sees which sample when.

Every epoch has one global order, the same on all ranks, shuffled by (seed, epoch). The global batch is a slice of it, and each
rank takes its part of that slice: two ranks with batches of 4 see together what one rank sees with batches of 8.
"""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from course_lib.config import UserError
from course_lib.world import World


class Batches(Sampler[list[int]]):
    """This rank's batches of an epoch, as sample numbers, from where `seen` samples of it are done.

    The last, incomplete global batch of an epoch is left out: every step has the same size.
    """

    def __init__(
        self, samples: int, batch: int, *, seed: int = 0, epoch: int = 0, seen: int = 0, world: World = World()
    ):
        self.samples, self.batch, self.seed, self.epoch, self.seen, self.world = (
            samples,
            batch,
            seed,
            epoch,
            seen,
            world,
        )
        self.global_batch = batch * world.world_size
        if samples < self.global_batch:
            raise UserError(
                f"--batch {batch} on {world.world_size} ranks needs {self.global_batch} samples a step, "
                f"and there are only {samples}; use a smaller --batch, fewer ranks or more years"
            )

    def __len__(self) -> int:
        return (self.samples - self.seen) // self.global_batch

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.samples, generator=generator)
        for number in range(len(self)):
            first = self.seen + number * self.global_batch + self.world.rank * self.batch
            yield order[first : first + self.batch].tolist()


def shard(samples: int, batch: int, world: World = World()) -> list[list[int]]:
    """This rank's batches for evaluation: over all ranks, every sample once and none twice; shards may be uneven."""
    if samples < world.world_size:
        raise UserError(f"{samples} validation samples can't occupy {world.world_size} ranks; hold out more years")
    mine = range(world.rank, samples, world.world_size)
    return [list(mine[first : first + batch]) for first in range(0, len(mine), batch)]
