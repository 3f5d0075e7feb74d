"""A ring all-reduce by hand, over MPI: everybody gets the sum, and nobody collects it.

The ranks stand in a circle, and the array is cut into as many pieces as there are ranks. Every rank passes a piece on to the next
and adds what comes to its own: after n − 1 rounds each has the finished sum of one piece (reduce-scatter). In n − 1 more rounds
the finished pieces go round (all-gather). A rank sends 2(n−1)/n of the array, however many ranks there are.

    ring.all_reduce(gradient.numpy(), MPI.COMM_WORLD)       # in place
"""

import numpy as np

CHUNK = 2**16  # numbers that travel together, while those before are added


def edges(length: int, ranks: int) -> list[int]:
    """Where the pieces begin and end: equal but for one, and empty where there are more ranks than numbers."""
    return [length * rank // ranks for rank in range(ranks + 1)]


def all_reduce(values: np.ndarray, comm, *, chunk: int = CHUNK) -> np.ndarray:
    """Add up an array over all ranks, in place; all must bring the same length and type."""
    flat = values.reshape(-1)
    if flat.size and not np.shares_memory(flat, values):
        raise ValueError("the array does not lie in one piece: nothing could be changed in place")
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
    """Pass `mine` on, and add to `other` what comes: while one chunk is added, the next is on its way."""
    sending = [comm.Isend(mine[a : a + chunk], to) for a in range(0, mine.size, chunk)]
    rooms = [np.empty(min(chunk, other.size), other.dtype) for _ in range(2)]
    starts = list(range(0, other.size, chunk))

    def expect(number: int):
        a = starts[number]
        return comm.Irecv(rooms[number % 2][: min(chunk, other.size - a)], source)

    coming = expect(0) if starts else None
    for number, a in enumerate(starts):
        coming.Wait()
        coming = expect(number + 1) if number + 1 < len(starts) else None
        part = other[a : a + chunk]
        part += rooms[number % 2][: part.size]
    for one in sending:
        one.Wait()
