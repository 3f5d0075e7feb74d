# %% [markdown]
# # Exercise 09 · Collectives made of messages
#
# In lesson 09 an all-reduce grew from `Send` and `Recv`. Here you write its parts yourself: a broadcast along a tree, and the
# two halves of the ring, reduce-scatter and all-gather. Each check starts your function with `mpiexec` on several processes,
# compares the arrays with what NumPy adds up in one process, and counts the messages.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens
# it. A check that fails says on which rank and in which element; `print` works on the ranks, too. Ranks that wait for each
# other are stopped after five seconds, and you are told where they were. Stuck? Each task has three hints; open them one at a
# time.

# %%
import math

import numpy as np

from course_lib import plots
from course_lib.checks import on_mpi, require, same, unseen

# %% [markdown]
# Your functions get a `comm` with `rank`, `size` and the messages between two ranks: `Send`, `Recv`, `Sendrecv`, `Isend`,
# `Irecv`, and those in lower case. It has no collectives, notes what is sent, and turns every `Send` into `Ssend`, which
# waits for its receiver however short the message is: as lesson 09 advises for tests.


# %%
class Watched:
    """MPI's world without collectives. `sent` has (to whom, how many numbers) of every message of this rank."""

    def __init__(self):
        from mpi4py import MPI

        self.comm, self.sent, self.error = MPI.COMM_WORLD, [], MPI.Exception
        self.rank, self.size = self.comm.rank, self.comm.size

    @unseen
    def __getattr__(self, name: str):
        if name.lower() not in ("send", "ssend", "isend", "recv", "irecv", "sendrecv", "get_rank", "get_size"):
            raise AttributeError(f"no {name} here: use messages between two ranks, as Send, Recv and Sendrecv are")
        waiting = {"Send": "Ssend", "send": "ssend", "Isend": "Issend", "isend": "issend"}

        @unseen
        def call(*given, **named):
            if "send" in name.lower():  # what, and to whom, with or without their names
                words = [named[word] for word in ("buf", "obj", "sendbuf", "sendobj") if word in named]
                what, dest = [*words, *given][0], named.get("dest", [*given, None, None][1])
                array = what[0] if isinstance(what, list | tuple) else what  # MPI's [array, type]
                self.sent.append((dest, np.size(array)))
            try:
                return getattr(self.comm, waiting.get(name, name))(*given, **named)
            except self.error as error:
                said = str(error).splitlines()[-1]
                if "truncated" in said:  # MPICH goes on with two numbers of bytes, the wrong way round
                    said = (
                        said.partition("truncated")[0] + "truncated: it is longer than the array that it should go into"
                    )
                raise RuntimeError(f"MPI says: {said}") from None

        return call


def ring(rank: int, ranks: int, length: int, first: int) -> list[tuple[int, int]]:
    """What a rank of a ring sends: a piece in each round, beginning with number `first`, to its right neighbour."""
    sizes = [len(piece) for piece in np.array_split(np.empty(length), ranks)]
    return [((rank + 1) % ranks, sizes[(first - turn) % ranks]) for turn in range(ranks - 1)]


# %% [markdown]
# ## 1 · A broadcast along a tree
#
# Rank 0's array shall be on all ranks, in place. Were rank 0 to send it to each of them, n − 1 rounds would pass. But whoever
# has it can help: after one round two ranks have it, after two rounds four. Write it so that it takes ⌈log₂ n⌉ rounds and n −
# 1 messages, for every number of ranks. In a round each rank sends at most one message.


# %% solution="broadcast"
def broadcast(array: np.ndarray, comm) -> None:
    """Rank 0's values on all ranks, in place."""
    ### BEGIN SOLUTION
    have = 1  # ranks 0 … have - 1 have it
    while have < comm.size:
        if comm.rank < have and comm.rank + have < comm.size:
            comm.Send(array, comm.rank + have)
        elif have <= comm.rank < 2 * have:
            comm.Recv(array, comm.rank - have)
        have *= 2
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Say ranks 0 to h − 1 have it. Who shall be next, so that after this round ranks 0 to 2h − 1 have it? All ranks run the same
# loop, and each asks what its part in this round is.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Rank r < h sends to r + h, if there is such a rank. Rank r with h ≤ r < 2h receives from r − h. All others do nothing in
# this round. Then h doubles.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `have = 1`, and `while have < comm.size:` three cases. `if comm.rank < have and comm.rank + have < comm.size:
# comm.Send(array, comm.rank + have)`. `elif have <= comm.rank < 2 * have: comm.Recv(array, comm.rank - have)`. Then `have *=
# 2`.
#
# </details>
#
# Who has it (1) after each round, on six ranks:

# %%
states = [[[int(rank < 2**turn)] for turn in range(4)] for rank in range(6)]
plots.rounds(states, ["before", "round 1", "round 2", "round 3"])


# %% check="broadcast" points=3
def check_broadcast(ranks: int, length: int) -> None:
    what = f"{length} numbers on {ranks} ranks"

    def run(rank):
        comm, array = Watched(), np.arange(length) + 1000 * rank
        broadcast(array, comm)
        return array, [to for to, _ in comm.sent]

    arrays, sends = zip(*on_mpi(ranks, run))
    mistakes = {"what it had before: nothing has come": [np.arange(length) + 1000 * rank for rank in range(ranks)]}
    same(arrays, [np.arange(length)] * ranks, f"rank 0's array, {what}", ranks=True, mistakes=mistakes)
    count = sum(map(len, sends))
    why = f"there were {count}: {dict(enumerate(sends))}; each rank needs it once"
    require(count == ranks - 1, f"{ranks - 1} messages, {what}", why)
    after, todo = {0: 0}, [0]  # the round after which a rank has it
    for rank in todo:
        todo += sends[rank]
        after |= {to: after[rank] + turn for turn, to in enumerate(sends[rank], start=1)}
    needed, rounds = math.ceil(math.log2(ranks)), max(after.values())
    why = f"it took {rounds} rounds, by these messages: {dict(enumerate(sends))}"
    why += "; rank 0 does it all alone" * (len(sends[0]) == ranks - 1) + "; a chain" * (max(map(len, sends)) == 1)
    require(rounds == needed, f"{needed} rounds, {what}", why)


check_broadcast(4, 3)
check_broadcast(7, 1)
### BEGIN HIDDEN TESTS
check_broadcast(3, 10)
check_broadcast(6, 1)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · The ring adds up
#
# The ranks stand in a circle, and the array is cut into n pieces: `np.array_split(array, comm.size)` gives views of it, of
# nearly equal length. In round 0 rank r sends piece r to its right neighbour, r + 1; it receives one from the left and adds
# it to its own piece of that number. In the next round it sends what it has added to. After n − 1 rounds rank r has the
# finished sum of piece r + 1; the circle has no end, so count modulo n.


# %% solution="scatter"
def reduce_scatter(array: np.ndarray, comm) -> None:
    """Add up over all ranks, in place: afterwards piece rank + 1 is finished here, and the others are not."""
    ### BEGIN SOLUTION
    pieces, n = np.array_split(array, comm.size), comm.size
    for turn in range(n - 1):
        mine, other = pieces[(comm.rank - turn) % n], pieces[(comm.rank - turn - 1) % n]
        came = np.empty_like(other)
        comm.Sendrecv(mine, (comm.rank + 1) % n, recvbuf=came, source=(comm.rank - 1) % n)
        other += came
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In round 0 the left neighbour, r − 1, sends its piece r − 1. Which piece does it send in round t? That is the one you
# receive, and the one that you send in the round after.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In round t rank r sends piece r − t and receives piece r − t − 1. All ranks send at the same time: with `Send` and then
# `Recv` they wait for each other for ever. `comm.Sendrecv(mine, dest, recvbuf=…, source=…)` does both. Receive into an array
# of its own, or what you had is gone.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `mine, other = pieces[(comm.rank - turn) % n], pieces[(comm.rank - turn - 1) % n]`; `came = np.empty_like(other)`;
# `comm.Sendrecv(mine, (comm.rank + 1) % n, recvbuf=came, source=(comm.rank - 1) % n)`; `other += came`. For `turn` in
# `range(n - 1)`.
#
# </details>
#
# Four ranks, four pieces of one number. Rank r brings 10 to the power of r, so a number tells whose are in it:


# %%
def held(rank: int, piece: int, turn: int) -> int:
    """After so many rounds: what this rank has added up in this piece."""
    way = (rank - piece) % 4  # how far the piece has come when it is here
    return sum(10 ** ((rank - step) % 4) for step in range(way + 1)) if way <= turn else 10**rank


states = [[[held(rank, piece, turn) for piece in range(4)] for turn in range(4)] for rank in range(4)]
plots.rounds(states, ["before", "round 0", "round 1", "round 2"])


# %% check="scatter" points=3
def tell(array: np.ndarray, rank: int, ranks: int) -> str:
    """What is wrong with rank's piece, in an array of sums of powers of ten."""
    pieces, number = np.array_split(array, ranks), (rank + 1) % ranks
    finished = [n for n, piece in enumerate(pieces) if len(piece) and (piece == int("1" * ranks)).all()]
    if number in finished or not len(pieces[number]):
        return ""
    value = int(pieces[number][pieces[number] != int("1" * ranks)][0])
    counts = [value // 10**other % 10 for other in range(ranks)]
    missing, often = [r for r, n in enumerate(counts) if n == 0], [r for r, n in enumerate(counts) if n > 1]
    found = f"rank {rank} has {value} in piece {number}, where {'1' * ranks} is expected"
    found += f": without the numbers of ranks {missing}" * bool(missing) + f": too often those of ranks {often}" * bool(
        often
    )
    return found + f"; finished is piece {finished}" * bool(finished)


def check_reduce_scatter(ranks: int, length: int) -> None:
    what = f"{length} numbers on {ranks} ranks"
    random = np.random.default_rng(length).integers(-1000, 1000, (ranks, length))

    def run(rank):
        comm, powers, other = Watched(), np.full(length, 10**rank), random[rank].copy()
        reduce_scatter(powers, comm)
        sent = list(comm.sent)
        reduce_scatter(other, comm)
        return powers, np.array_split(other, ranks)[(rank + 1) % ranks], sent

    powers, pieces, sent = zip(*on_mpi(ranks, run))
    wrong = [tell(array, rank, ranks) for rank, array in enumerate(powers) if tell(array, rank, ranks)]
    require(not wrong, f"whose numbers are added up, {what}", "".join(wrong[:1]))
    sums = np.array_split(random.sum(axis=0), ranks)
    wanted = [sums[(rank + 1) % ranks] for rank in range(ranks)]
    same(pieces, wanted, f"the sums, {what}", ranks=True)
    plan = [ring(rank, ranks, length, first=rank) for rank in range(ranks)]
    mistakes = {
        "the whole array in every round: send one piece": [[(to, length) for to, _ in messages] for messages in plan],
        "a round too many": [
            [*ring(r, ranks, length, r), ((r + 1) % ranks, len(sums[(r + 1) % ranks]))] for r in range(ranks)
        ],
    }
    got, plan = ([[message for message in messages if message[1]] for messages in all_] for all_ in (sent, plan))
    same(got, plan, f"(to whom, how many numbers) in each round, {what}", ranks=True, mistakes=mistakes)


check_reduce_scatter(3, 7)
### BEGIN HIDDEN TESTS
check_reduce_scatter(4, 2)
check_reduce_scatter(2, 100_003)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · The ring passes on
#
# Now piece r + 1 is finished on rank r, and all others are leftovers there. The finished pieces go round: in every round each
# rank sends the newest one that it has to its right neighbour, and receives another one from the left, into its place. After
# n − 1 rounds all ranks have all of them. Nothing is added any more. Together with task 2 that is the all-reduce.


# %% solution="gather"
def all_gather(array: np.ndarray, comm) -> None:
    """From piece rank + 1 on each rank to all pieces on all ranks, in place."""
    ### BEGIN SOLUTION
    pieces, n = np.array_split(array, comm.size), comm.size
    for turn in range(n - 1):
        mine, other = pieces[(comm.rank + 1 - turn) % n], pieces[(comm.rank - turn) % n]
        comm.Sendrecv(mine, (comm.rank + 1) % n, recvbuf=other, source=(comm.rank - 1) % n)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# In round 0 rank r sends piece r + 1. What does its left neighbour send at that time? That one you send in round 1.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In round t rank r sends piece r + 1 − t and receives piece r − t. The pieces are views of the array: `Sendrecv` may receive
# right into one.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `mine, other = pieces[(comm.rank + 1 - turn) % n], pieces[(comm.rank - turn) % n]`, and `comm.Sendrecv(mine, (comm.rank + 1)
# % n, recvbuf=other, source=(comm.rank - 1) % n)`, for `turn` in `range(n - 1)`.
#
# </details>
#
# Four ranks, four pieces; 1111 is finished, 0 stands for what is left over:

# %%
states = [[[1111 * ((rank + 1 - piece) % 4 <= turn) for piece in range(4)] for turn in range(4)] for rank in range(4)]
plots.rounds(states, ["before", "round 0", "round 1", "round 2"])


# %% check="gather" points=2
def check_all_gather(ranks: int, length: int) -> None:
    what = f"{length} numbers on {ranks} ranks"
    finished = np.arange(1, length + 1) * 10

    def start(rank):
        """The finished piece, and leftovers that tell whose they are."""
        array = np.full(length, -1 - rank)
        np.array_split(array, ranks)[(rank + 1) % ranks][:] = np.array_split(finished, ranks)[(rank + 1) % ranks]
        return array

    def run(rank):
        comm, array = Watched(), start(rank)
        all_gather(array, comm)
        return array, comm.sent

    arrays, sent = zip(*on_mpi(ranks, run))
    leftovers = [
        f"rank {rank} has at [{place}] a leftover of rank {-1 - value}"
        + (": it was not replaced" if -1 - value == rank else ": it was sent as if it were finished")
        for rank, array in enumerate(arrays)
        for place, value in enumerate(array.tolist())
        if -ranks <= value < 0
    ]
    require(not leftovers, f"no leftovers, {what}", max(leftovers, key=len, default=""))
    same(arrays, [finished] * ranks, f"all pieces on all ranks, {what}", ranks=True)
    plan = [ring(rank, ranks, length, first=rank + 1) for rank in range(ranks)]
    mistakes = {
        "the whole array in every round: send one piece": [[(to, length) for to, _ in messages] for messages in plan],
        "a round too many": [
            [*ring(r, ranks, length, r + 1), *ring(r, ranks, length, r + 2)[:1]] for r in range(ranks)
        ],
    }
    got, plan = ([[message for message in messages if message[1]] for messages in all_] for all_ in (sent, plan))
    same(got, plan, f"(to whom, how many numbers) in each round, {what}", ranks=True, mistakes=mistakes)


check_all_gather(3, 7)
### BEGIN HIDDEN TESTS
check_all_gather(4, 10)
check_all_gather(2, 100_003)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `course_lib/parallel/messages.py` has the tree, and `course_lib/parallel/ring.py` the ring, whose pieces travel in chunks
# that are added while they are in the processor's cache. *Your ring sends 2(n − 1) messages from each rank, a tree there and
# back 2⌈log₂ n⌉ at most. For which arrays would you take the tree?*
#
# **Next:** [10 · Horovod](../../notebooks/10_horovod.ipynb).
