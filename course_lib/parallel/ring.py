"""A ring all-reduce by hand, over MPI: everybody gets the sum, and nobody collects it.

The ranks stand in a circle, and the array is cut into as many pieces as there are ranks. Every rank passes a piece on to the next
and adds what comes to its own: after n − 1 rounds each has the finished sum of one piece (reduce-scatter). In n − 1 more rounds
the finished pieces go round (all-gather). A rank sends 2(n−1)/n of the array, however many ranks there are.

    ring.all_reduce(gradient.numpy(), MPI.COMM_WORLD)       # in place

At the end of the file it is a strategy of the trainer, beside one in which MPI's own all-reduce averages the gradients.
"""

from collections.abc import Callable

import numpy as np
from torch import nn

from course_lib.config import Config, UserError
from course_lib.parallel.ddp import make_buckets, start_equal
from course_lib.timeline import unrecorded
from course_lib.world import World

CHUNK = 2**16  # numbers that travel together and are added at once: few enough for the cache


def edges(length: int, ranks: int) -> list[int]:
    """Where the pieces begin and end: equal but for one, and empty where there are more ranks than numbers."""
    return [length * rank // ranks for rank in range(ranks + 1)]


def all_reduce(values: np.ndarray, comm, *, chunk: int = CHUNK) -> np.ndarray:
    """Add up an array over all ranks, in place; all must bring the same length and type."""
    if not values.flags.c_contiguous:
        raise ValueError("the array does not lie in one piece: nothing could be changed in place")
    flat = values.reshape(-1)
    n, rank = comm.Get_size(), comm.Get_rank()
    edge = edges(flat.size, n)
    pieces = [flat[a:b] for a, b in zip(edge, edge[1:])]
    to, source = (rank + 1) % n, (rank - 1) % n
    for turn in range(n - 1):  # reduce-scatter
        send_and_add(pieces[(rank - turn) % n], pieces[(rank - turn - 1) % n], comm, to, source, chunk)
    for turn in range(n - 1):  # all-gather
        comm.Sendrecv(pieces[(rank - turn + 1) % n], to, recvbuf=pieces[(rank - turn) % n], source=source)
    return values


def send_and_add(mine: np.ndarray, other: np.ndarray, comm, to: int, source: int, chunk: int) -> None:
    """Pass `mine` on, and add to `other` what comes, chunk by chunk: each is added while it is still in the cache."""
    sending = [comm.Isend(mine[a : a + chunk], to) for a in range(0, mine.size, chunk)]
    room = np.empty(min(chunk, other.size), other.dtype)
    for a in range(0, other.size, chunk):
        part = other[a : a + chunk]
        comm.Recv(room[: part.size], source)
        part += room[: part.size]
    for one in sending:
        one.Wait()


# ---- gradients -------------------------------------------------------------------------------------------------------------


def mpi_all_reduce(values: np.ndarray, comm) -> np.ndarray:
    """MPI's own, in place."""
    from mpi4py import MPI

    comm.Allreduce(MPI.IN_PLACE, values)
    return values


def averaged_by(all_reduce: Callable):
    """A strategy: the buckets of ddp.bucketed, added up by MPI in the memory of the CPU; from a GPU they are copied there."""

    def strategy(model: nn.Module, world: World, config: Config = Config(), timeline=None):
        from mpi4py import MPI

        if MPI.COMM_WORLD.size != world.world_size:
            raise UserError(
                f"--strategy {config.strategy} needs all {world.world_size} ranks in one MPI world, and MPI knows of "
                f"{MPI.COMM_WORLD.size}: start them with mpirun and --launcher mpi"
            )
        buckets = make_buckets(start_equal(model, world), config.bucket_mb)
        span = timeline.span if timeline else unrecorded

        def sync() -> None:
            for bucket in buckets:
                flat = bucket.fill(world.world_size)
                with span("communicate"):
                    here = flat.cpu()  # the same tensor, if it is there already
                    all_reduce(here.numpy(), MPI.COMM_WORLD)
                    flat.copy_(here)
                bucket.hand_back()

        return model, sync

    return strategy
