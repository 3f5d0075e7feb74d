"""Collectives made of nothing but messages between two ranks, over MPI: what MPI's own do, in the simplest way that is not slow.

    messages.broadcast(array, MPI.COMM_WORLD)       # rank 0's array, on all ranks
    messages.reduce(array, MPI.COMM_WORLD)          # the sum of all arrays, on rank 0

All work in place on arrays of the same length and type, and are called by all ranks, in the same order. ring.py has the one
collective for which a tree is not good enough.
"""

import numpy as np


def broadcast(array: np.ndarray, comm) -> None:
    """Rank 0's values to all, along a tree: those who have them tell another; 1, 2, 4, … ranks have them."""
    distance = 1
    while distance < comm.size:
        if comm.rank < distance and comm.rank + distance < comm.size:
            comm.Send(array, comm.rank + distance)
        elif distance <= comm.rank < 2 * distance:
            comm.Recv(array, comm.rank - distance)
        distance *= 2


def reduce(array: np.ndarray, comm) -> None:
    """The sum of all to rank 0, down the same tree; on the other ranks sums of a part are left over."""
    theirs = np.empty_like(array)
    distance = 1
    while distance < comm.size:
        distance *= 2
    while distance > 1:
        distance //= 2
        if distance <= comm.rank < 2 * distance:
            comm.Send(array, comm.rank - distance)
        elif comm.rank < distance and comm.rank + distance < comm.size:
            comm.Recv(theirs, comm.rank + distance)
            array += theirs


def scatter(rows: np.ndarray | None, row: np.ndarray, comm) -> None:
    """Row r of rank 0's table to rank r, one after the other."""
    if comm.rank:
        comm.Recv(row, 0)
        return
    for rank in range(1, comm.size):
        comm.Send(rows[rank], rank)
    row[:] = rows[0]


def gather(row: np.ndarray, rows: np.ndarray | None, comm) -> None:
    """Everybody's row into rank 0's table; it takes them in whatever order they come."""
    if comm.rank:
        comm.Send(row, 0)
        return
    coming = [comm.Irecv(rows[rank], rank) for rank in range(1, comm.size)]
    rows[0] = row
    for one in coming:
        one.Wait()


def all_reduce(array: np.ndarray, comm) -> None:
    """The naive way: everything to rank 0, and everything back."""
    reduce(array, comm)
    broadcast(array, comm)
