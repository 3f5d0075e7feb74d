# Plausible wrong answers to exercise 09. "# %% function: words" says what the check must say.

# %% broadcast: rank 0 does it all alone
def broadcast(array, comm):
    if comm.rank == 0:
        for rank in range(1, comm.size):
            comm.Send(array, rank)
    else:
        comm.Recv(array, 0)


# %% broadcast: a chain
def broadcast(array, comm):
    if comm.rank:
        comm.Recv(array, comm.rank - 1)
    if comm.rank + 1 < comm.size:
        comm.Send(array, comm.rank + 1)


# %% broadcast: in `broadcast`, line 5 of its cell (`comm.Send(array, comm.rank + have)`)
def broadcast(array, comm):
    have = 1
    while have < comm.size:
        if comm.rank < have:  # three ranks are not four
            comm.Send(array, comm.rank + have)
        elif comm.rank < 2 * have:
            comm.Recv(array, comm.rank - have)
        have *= 2


# %% broadcast: somebody waits, or loops, for ever: rank 0 is in `broadcast`, line
def broadcast(array, comm):
    have = 1
    while have < comm.size:  # it stays 1
        if comm.rank < have and comm.rank + have < comm.size:
            comm.Send(array, comm.rank + have)
        elif have <= comm.rank < 2 * have:
            comm.Recv(array, comm.rank - have)


# %% broadcast: no Bcast here: use messages between two ranks
def broadcast(array, comm):
    comm.Bcast(array, 0)


# %% broadcast: what it had before
def broadcast(array, comm):
    if comm.rank == 0:
        for rank in range(1, comm.size):
            comm.send(array, rank)
    else:
        array = comm.recv(source=0)


# %% broadcast: it took 4 rounds
def broadcast(array, comm):
    if comm.rank:
        comm.Recv(array, (comm.rank - 1) // 2)
    for child in (2 * comm.rank + 1, 2 * comm.rank + 2):  # a tree with two branches everywhere
        if child < comm.size:
            comm.Send(array, child)


# %% scatter: they wait for each other: a deadlock
def reduce_scatter(array, comm):
    pieces, n = np.array_split(array, comm.size), comm.size
    for turn in range(n - 1):
        mine, other = pieces[(comm.rank - turn) % n], pieces[(comm.rank - turn - 1) % n]
        came = np.empty_like(other)
        comm.Send(mine, (comm.rank + 1) % n)
        comm.Recv(came, (comm.rank - 1) % n)
        other += came


# %% scatter: without the numbers of ranks [1, 2]
def reduce_scatter(array, comm):
    pieces, n = np.array_split(array, comm.size), comm.size
    for turn in range(n - 2):  # off by one
        mine, other = pieces[(comm.rank - turn) % n], pieces[(comm.rank - turn - 1) % n]
        came = np.empty_like(other)
        comm.Sendrecv(mine, (comm.rank + 1) % n, recvbuf=came, source=(comm.rank - 1) % n)
        other += came


# %% scatter: without the numbers of ranks [0, 2]
def reduce_scatter(array, comm):
    pieces, n = np.array_split(array, comm.size), comm.size
    for turn in range(n - 1):
        mine, other = pieces[(comm.rank - turn) % n], pieces[(comm.rank - turn - 1) % n]
        comm.Sendrecv(mine, (comm.rank + 1) % n, recvbuf=other, source=(comm.rank - 1) % n)  # over what was there


# %% scatter: send one piece
def reduce_scatter(array, comm):
    n, came, passed = comm.size, np.empty_like(array), array.copy()
    for turn in range(n - 1):
        comm.Sendrecv(passed, (comm.rank + 1) % n, recvbuf=came, source=(comm.rank - 1) % n)
        array += came
        passed = came.copy()


# %% scatter: a round too many
def reduce_scatter(array, comm):
    pieces, n = np.array_split(array, comm.size), comm.size
    for turn in range(n):  # a round too many
        mine, other = pieces[(comm.rank - turn) % n], pieces[(comm.rank - turn - 1) % n]
        came = np.empty_like(other)
        comm.Sendrecv(mine, (comm.rank + 1) % n, recvbuf=came, source=(comm.rank - 1) % n)
        other += came


# %% gather: it was sent as if it were finished
def all_gather(array, comm):
    pieces, n = np.array_split(array, comm.size), comm.size
    for turn in range(n - 1):  # begins with piece r, as the first half did
        mine, other = pieces[(comm.rank - turn) % n], pieces[(comm.rank - turn - 1) % n]
        comm.Sendrecv(mine, (comm.rank + 1) % n, recvbuf=other, source=(comm.rank - 1) % n)


# %% gather: it was not replaced
def all_gather(array, comm):
    pieces, n = np.array_split(array, comm.size), comm.size
    for turn in range(n - 2):
        mine, other = pieces[(comm.rank + 1 - turn) % n], pieces[(comm.rank - turn) % n]
        comm.Sendrecv(mine, (comm.rank + 1) % n, recvbuf=other, source=(comm.rank - 1) % n)


# %% gather: truncated
def all_gather(array, comm):
    size, n = -(-len(array) // comm.size), comm.size
    pieces = [array[rank * size : (rank + 1) * size] for rank in range(n)]  # not those that array_split makes
    for turn in range(n - 1):
        mine, other = pieces[(comm.rank + 1 - turn) % n], pieces[(comm.rank - turn + 1) % n]
        comm.Sendrecv(mine.copy(), (comm.rank + 1) % n, recvbuf=other, source=(comm.rank - 1) % n)
