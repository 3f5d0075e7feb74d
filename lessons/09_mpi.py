# %% [markdown]
# # 09 · MPI: one message after the other
#
# Nearly all that our ranks have done together so far was a single word: `all_reduce`. What happens behind it? On clusters the
# language for that is **MPI**, the *Message Passing Interface*: since 1994 processes have talked to each other in it, and gloo
# and NCCL have learned from it. It is small. In this lesson you send your first message, and at the end of it the UNet is
# trained by an all-reduce that you have seen grow from `Send` and `Recv`.
#
# After this lesson
#
# 1. you have sent messages, have seen two ranks wait for each other for ever, and know three cures;
# 2. you have seen a ring all-reduce at work, round by round, and measured it against MPI's own and gloo's;
# 3. you have trained with gradients that MPI has averaged, and with DDP started by `mpirun`, to the same bits.
#
# **New since lesson 08:** `mpi4py`, which brings MPI to Python. Back to plain data parallelism: every rank has the whole
# model, and only who carries the gradients changes.

# %% tags=["parameters"]
data = "../data/years"
runs = "../runs"
width = 16
batch = 4  # samples per step on each rank
steps = 5  # of the proof
sizes = [2**power for power in range(8, 25, 2)]  # bytes of the messages that are timed: 256 B … 16 MiB
repeats = 15  # how often each is timed
max_steps = 60  # of the training runs, at least 20

# %% [markdown]
# ## One world
#
# MPI's launcher, `mpirun`, starts the same program several times. The processes form a *communicator*, `COMM_WORLD`, in which
# each has a rank. The ranks of our notebooks have always been started by it; we only never talked to it directly.

# %%
from course_lib import plots, ranks
from course_lib.lesson import numbers, shell, show

team = ranks.start(2)

# %%
# %%px
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
print(f"rank {comm.rank} of {comm.size}, {MPI.Get_library_version().splitlines()[0]}")

# %% [markdown]
# ## Send and receive
#
# A message has a sender, a receiver and a content, and both sides must call: one `send`, the other `recv`. In lower case
# mpi4py takes any Python object. Both ranks run the same cell, so an `if` decides who does what:

# %%
# %%px
if comm.rank == 0:
    comm.send({"learning rate": 1e-3, "layers": [16, 32]}, dest=1)
else:
    print("received", comm.recv(source=0))

# %% [markdown]
# With a capital letter it takes memory as it is: an array, without a word about its type or shape. The receiver must have
# room for it. That is how gradients travel:

# %%
# %%px
array = np.arange(3.0) if comm.rank == 0 else np.empty(3)
if comm.rank == 0:
    comm.Send(array, dest=1)
else:
    comm.Recv(array, source=0)
print(array)

# %% [markdown]
# *Why two kinds? What does `send` have to do that `Send` has not?*
#
# <details><summary>Answer</summary>
#
# It *pickles*: the object is written into a string of bytes, a copy. The receiver first asks how long that is, makes room,
# receives it, and builds a new object from it: more copies. For a dictionary nobody cares, for 100 MB of gradients
# everybody does.
#
# </details>
#
# ### Pickles against buffers
#
# A message goes there and comes back, many times: *ping-pong*. Half of that time is the time of one message. The clock is
# rank 0's; with both kinds the array has to be in its place at the end, which `recv` leaves to us.

# %%
# %%px
import statistics
import time


def ping_pong(send, receive, times: int) -> float:
    """Seconds of one message from one rank to the other."""
    comm.Barrier()
    began = time.perf_counter()
    for _ in range(times):
        (send, receive)[comm.rank]()
        (receive, send)[comm.rank]()
    return (time.perf_counter() - began) / times / 2


# %%
team["sizes"], team["repeats"] = sizes, repeats

# %%
# %%px
seconds = {"send, recv: pickles": [], "Send, Recv: buffers": []}
other = 1 - comm.rank
arrays = [np.zeros(size // 4, np.float32) for size in sizes]
for a in arrays:
    pickles = (lambda a=a: comm.send(a, other)), (lambda a=a: np.copyto(a, comm.recv(source=other)))
    buffers = (lambda a=a: comm.Send(a, other)), (lambda a=a: comm.Recv(a, other))
    for line, pair in zip(seconds.values(), (pickles, buffers)):
        line.append(statistics.median(ping_pong(*pair, times=5) for _ in range(repeats)))

# %%
kilobytes = [size / 1e3 for size in sizes]
lines = {name: (kilobytes, [1e3 * s for s in line]) for name, line in team["seconds"][0].items()}
plots.curves(lines, xlabel="message (kB)", ylabel="time (ms)", logarithmic=True)
pickled, plain = (lines[name][1][-1] for name in ("send, recv: pickles", "Send, Recv: buffers"))
print(f"{sizes[-1] / 1e6:.0f} MB: a pickle takes {pickled / plain:.1f} times as long as the buffer")

# %% [markdown]
# To the left both are flat: that is the *latency*, and what pickling costs on top of it. To the right the length counts,
# and with it every copy. (These ranks share a memory. Over a network both lines lie higher, and the copies stay.)
#
# ## A deadlock, on purpose
#
# Now both ranks want to swap arrays. Each sends its own, and then receives the other's. It looks right, and with ten numbers it
# works:

# %%
swap = """
mine, theirs = np.full({length}, comm.rank), np.empty({length}, int)
comm.Send(mine, 1 - comm.rank)
comm.Recv(theirs, 1 - comm.rank)
print("my", comm.rank, "for a", theirs[0])
"""
team.run(swap.format(length=10))

# %% [markdown]
# *And with a million?* We give it five seconds.

# %%
try:
    team.run(swap.format(length=1_000_000), timeout=5)
    raise AssertionError("this MPI sends a million numbers before anybody receives them")
except ranks.RanksError as error:
    print(error)

# %% [markdown]
# They would stand there for ever. A *small* message is put into a buffer on its way, and `Send` returns at once (*eager*). A
# *large* one has no room there: `Send` waits until the receiver has called `Recv` (*rendezvous*). Both ranks are in `Send`,
# each waits for the other's `Recv`, and neither will come to it. The nasty part is that this program passes every test
# with small data. (`Ssend`, a *synchronous* send, always waits for the receiver. Put it in place of `Send` in a test, and the
# mistake shows with ten numbers.)
#
# Three cures, this time with four ranks in a circle, each of which passes an array on to its right neighbour:
#
# 1. **order**: the even ranks send first, the odd ones receive first;
# 2. **`Sendrecv`**: one call that does both, and MPI takes care of the order;
# 3. **non-blocking**: `Isend` and `Irecv` return at once with a *request*; the waiting is done later, in `Wait`.

# %%
team = ranks.start(4)

# %%
# %%px
import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
mine, theirs = np.full(1_000_000, comm.rank), [np.empty(1_000_000, int) for _ in range(3)]

# %%
# %%px
if comm.rank % 2 == 0:  # 1. order
    comm.Send(mine, right)
    comm.Recv(theirs[0], left)
else:
    comm.Recv(theirs[0], left)
    comm.Send(mine, right)

# %%
# %%px
comm.Sendrecv(mine, right, recvbuf=theirs[1], source=left)  # 2. both in one

requests = [comm.Isend(mine, right), comm.Irecv(theirs[2], left)]  # 3. now, and wait later
MPI.Request.Waitall(requests)
assert all((array == left).all() for array in theirs)
print("three times from rank", theirs[0][0])

# %% [markdown]
# *Cure 1 needs an even number of ranks in the circle, or does it? Think of three.*
#
# <details><summary>Answer</summary>
#
# It works with three as well, only not all at once: 0 sends to 1, which receives; 2 wants to send to 0, which is still
# busy, and waits for a moment; then 0 receives, and so on. It can't lock as long as one rank of the circle sends first and
# one receives first.
#
# </details>
#
# The third cure can do more than the others: between `Irecv` and `Wait` there is time to compute. That is how our pipeline of
# lesson 07 expects its next message. The array must not be touched meanwhile. (Do not expect too much of it: most MPIs move a
# large message only while the program is inside of a call of MPI, unless they have a thread of their own for that.)
#
# ## Collectives, made of messages
#
# Broadcast: rank 0 could send to everybody, one after the other: n − 1 messages in a row. But whoever has the array can help.
# After one round two have it, after two rounds four. That is a *tree* of ⌈log₂ n⌉ rounds, ten for a thousand ranks:

# %%
from course_lib.parallel import messages, ring

show(messages.broadcast)

# %% [markdown]
# `reduce`, the sum of all on rank 0, is the same tree from the leaves down. Both together are an all-reduce, if a naive one:

# %%
# %%px
from course_lib.parallel import messages

array = np.full(4, 10.0**comm.rank)
messages.reduce(array, comm)
reduced = array.copy()
messages.broadcast(array, comm)
print(f"reduced {reduced.tolist()}, then broadcast {array.tolist()}")
assert (array == comm.allreduce(10.0**comm.rank)).all()

# %% [markdown]
# (The library's `messages.py` has `scatter` and `gather` too.) *What is naive about it?*
#
# <details><summary>Answer</summary>
#
# In nearly every round some ranks have nothing to do, and those that work carry the *whole* array. Rank 0 receives it log₂ n
# times, and sends it as often. For a few bytes that hardly matters; for megabytes a way is wanted in which all links work all
# the time.
#
# </details>
#
# ## The ring
#
# The array is cut into n pieces. In every round each rank sends *one piece* to its right neighbour and receives another one
# from the left: all links are busy, and nobody is special. First the sums grow while they go round (*reduce-scatter*), then
# the finished pieces go round once more (*all-gather*). Here it is with a pause after every round:

# %%
# %%px
from course_lib.parallel import ring

n = comm.size
values = np.full(n, 10.0**comm.rank)
pieces, states = [values[piece : piece + 1] for piece in range(n)], [values.tolist()]
for turn in range(n - 1):  # reduce-scatter
    ring.send_and_add(pieces[(comm.rank - turn) % n], pieces[(comm.rank - turn - 1) % n], comm, right, left, chunk=1)
    states.append(values.tolist())
for turn in range(n - 1):  # all-gather
    comm.Sendrecv(pieces[(comm.rank - turn + 1) % n], right, recvbuf=pieces[(comm.rank - turn) % n], source=left)
    states.append(values.tolist())

# %%
titles = ["before", *(f"reduce-scatter {n}" for n in (1, 2, 3)), *(f"all-gather {n}" for n in (1, 2, 3))]
plots.rounds(team["states"], titles)
assert all(states[-1] == [1111.0] * 4 for states in team["states"])

# %% [markdown]
# Rank r brings 10 to the power of r, so a number tells whose values are in it; the darker, the more. Follow one column
# through the first row of panels: its sum walks from rank to rank and grows. After three rounds every rank has one finished
# piece, 1111, each another one. The second row copies what is finished.
#
# **Predict** what a rank sends: 2(n − 1) pieces of 1/n. For large n that is twice the array, *however many ranks there are*.
# In a tree rank 0 alone receives the array log₂ n times. The real function is the same two loops:

# %%
show(ring.all_reduce)

# %% [markdown]
# It must be right for every length: also for 1 number on 4 ranks, where three pieces are empty, and for none at all. MPI's
# own `Allreduce` is the judge:

# %%
# %%px
random = np.random.default_rng(comm.rank)
lengths = [0, 1, 3, 4, 5, 1000, 100_003]
for length in lengths:
    mine = random.integers(-1000, 1000, length)
    expected = np.empty_like(mine)
    comm.Allreduce(mine, expected)
    assert np.array_equal(ring.all_reduce(mine.copy(), comm), expected)
print(f"rank {comm.rank}: equal for {lengths} numbers")

# %% [markdown]
# One detail makes it fast. A piece does not travel as a whole but in *chunks*, each of which is added as soon as it is there,
# while it is still in the processor's cache. All sends begin at once and are waited for at the end: cure 3 at work.

# %%
show(ring.send_and_add)

# %% [markdown]
# ## What it costs
#
# Three all-reduces in the same two processes, in turns: ours, written in Python; `MPI_Allreduce`, in C; and gloo's, which
# PyTorch uses on CPUs. For each, the model of lesson 06 is fitted: α seconds a message, β seconds a byte. *Your guess: by
# which factor does Python lose, with small messages and with large ones?*

# %%
team = ranks.start(2)
team["sizes"], team["repeats"] = sizes, repeats

# %%
# %%px
from course_lib.config import Config
from course_lib.probe import race
from course_lib.world import start as join_world

world = join_world(Config(launcher="mpi", device="cpu", timeout=60))
raced = race(world, sizes, repeats=repeats)

# %%
import statistics

raced = team["raced"][0]
lines = {name: (kilobytes, [1e3 * statistics.median(row["seconds"]) for row in rows]) for name, rows in raced.items()}
plots.curves(lines, xlabel="message (kB)", ylabel="all-reduce (ms)", logarithmic=True)

# %%
from course_lib import scaling
from course_lib.cockpit import Table

fitted = {name: scaling.fit_network(rows, cores=0) for name, rows in raced.items()}
speeds = {name: f"{1e-9 / net.beta:.2f}" if net.beta else "–" for name, net in fitted.items()}  # –: lost in noise
rows = [(name, f"{1e6 * net.alpha:.0f}", speeds[name]) for name, net in fitted.items()]
Table(("all-reduce", "α (µs a message)", "1/β (GB/s)"), rows)

# %% [markdown]
# On the left Python pays: every call of `Isend`, `Irecv` and `Wait` costs microseconds, MPI's own needs a few in all. On the
# right the bytes count, copying and adding is done by C in either case, and the ring by hand comes close to the real one or
# passes it. gloo's sockets cost more than MPI's shared memory; between nodes that can be different, and on GPUs NCCL beats
# all three, since data need not pass through the CPU's memory. `benchmarks/mpi.py` measures the same with care.
#
# ## Train with it
#
# In lesson 04 gradients were put into buckets, and `add_up` sent them. Here is all that changes when MPI sends them:

# %%
show(ring.averaged_by)

# %% [markdown]
# Now the proof: three ways, the same samples, several steps; first DDP, whose messages gloo carries, then MPI's own all-reduce,
# then the ring. On two ranks, and on CPUs, we ask for the same bits.

# %%
from course_lib.config import Config

config = Config(data=data, runs=runs, width=width, batch=batch, bucket_mb=0.1, launcher="mpi", device="cpu")
team["config"], team["steps"] = config, steps

# %%
# %%px
from itertools import islice

import torch

from course_lib.data.batches import Batches
from course_lib.data.tasks import make_task
from course_lib.parallel import STRATEGIES
from course_lib.trainer import make_model, train_step

task = make_task(config, world)


def load(indices):
    x, y = zip(*(task.train[index] for index in indices))
    return torch.stack(x).to(world.device), torch.stack(y).to(world.device)


# %%
# %%px
def train(strategy: str) -> list[torch.Tensor]:
    """The weights after a few steps."""
    model = make_model(config, task).to(world.device)
    wrapped, sync = STRATEGIES[strategy](model, world, config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for indices in islice(Batches(len(task.train), config.batch, world=world), steps):
        train_step(wrapped, load(indices), optimizer, sync)
    return [parameter.detach().cpu() for parameter in model.parameters()]


weights = {name: train(name) for name in ("ddp", "mpi", "mpi_ring")}

# %%
import torch

flat = {name: torch.cat([part.flatten() for part in parts]) for name, parts in team["weights"][0].items()}
apart = {name: (flat[name] - flat["ddp"]).abs().max().item() for name in ("mpi", "mpi_ring")}
for name, distance in apart.items():
    print(f"{name:8} after {steps} steps: largest difference from DDP's weights {distance:g}")
moved = (flat["ddp"] - torch.cat([p.flatten() for p in team["weights"][1]["ddp"]])).abs().max().item()
assert max(apart.values()) == moved == 0  # and both ranks have the same

# %% [markdown]
# *Would it be the same bits on three ranks?*
#
# <details><summary>Answer</summary>
#
# No: (a + b) + c and a + (b + c) differ in their last digit, and every algorithm adds in its own order. The tests compare
# three ranks to a tolerance.
#
# </details>
#
# Ours waits for the end of backward; it is the second way of lesson 04, not the third. That is one reason why nobody writes
# this for work. The other is the GPU: `flat.cpu()` and back is a journey that NCCL does not make. A *GPU-aware* MPI takes the
# address of GPU memory in `Send` and moves the bytes over NVLink or InfiniBand by itself. It has to be built for that (ask for
# your site's module); with any other MPI the same call crashes. The wheels of this course are not GPU-aware, so we copy.
#
# ## DDP, started by MPI
#
# So in practice MPI does what it does best on a cluster: it *starts* processes on many nodes and lets them find each other.
# Gradients travel by DDP. Under `--launcher mpi` our program asks the communicator for its rank, and rank 0 broadcasts where
# to meet, a host and a port that is free:

# %%
from course_lib import world

show(world._ask_mpi)

# %% [markdown]
# Our weather forecaster has an ancestor with four versions. Its *v3* read each sample lazily from the yearly files, *v4* also
# *prefetched* the next batch, and *v3_mpi* and *v4_mpi* were the same two with processes started by MPI: the only ones that ran
# on several nodes. Here is that pair:

# %%
from pathlib import Path

config = Config(
    name="09_lazy",
    data=str(Path(data).resolve()),
    runs=str(Path(runs).resolve()),
    width=width,
    batch=batch,
    max_steps=max_steps,
    epochs=100,
    strategy="ddp",
    launcher="mpi",
    device="cpu",
    log_every=5,
    prefetch=0,
)
ahead = config.replace(name="09_ahead", prefetch=2)
for one in (config, ahead):
    shell(f"mpirun -n 2 python -m mpi4py -m course_lib.train {' '.join(one.arguments())}", timeout=3600)

# %% [markdown]
# `python -m mpi4py` in front of the program is an insurance. If one rank fails, the others would wait for it for ever; this
# ends all of them. And the same by torchrun, to compare:

# %%
from course_lib import checkpoint
from course_lib.metrics import read_log

by_torchrun = ahead.replace(name="09_torchrun", launcher="env")
ranks.torchrun(2, by_torchrun, quiet=True)
ends, models = {}, {}
for one in (config, ahead, by_torchrun):
    log = read_log(one.run)
    waits = [event["wait_share"] for event in log if event["event"] == "step"][1:]
    ends[one.name] = next(event for event in reversed(log) if event["event"] == "eval")["loss"]
    models[one.name] = checkpoint.load(one.run / "checkpoint.pt")["model"]
    print(
        f"{one.name:12} validation loss {ends[one.name]:.6f}; {statistics.median(waits):.1%} of the time waits for data"
    )
for model in models.values():
    assert all(torch.equal(model[name], models["09_lazy"][name]) for name in model)

# %% [markdown]
# The same weights to the last bit, whoever starts the ranks, and whether a batch is read in time or ahead of time. And what has
# prefetching brought? Here not much: our years are small and lie in memory, so there is little to wait for, and the reading
# thread needs a core that the ranks would like to have. Where a batch takes long to read it takes the waiting away; lesson 02
# has measured when. The ancestor read slowly, and needed it.
#
# ## Silent worlds of one
#
# There is more than one MPI, and their launchers speak different protocols. Start the ranks with the mpirun of *another* MPI,
# and none of them hears of the others. We can have that without another MPI: take away the variable by which mpirun and its
# ranks find each other.

# %%
hello = "from mpi4py import MPI; print('rank', MPI.COMM_WORLD.rank, 'of', MPI.COMM_WORLD.size)"
shell(f'mpirun -n 2 python -c "{hello}"')
print("and with the wrong launcher:")
wrong = f'mpirun -n 2 env --unset=PMI_FD python -c "{hello}"'
shell(wrong)
shell(f"test $({wrong} | grep -c 'rank 0 of 1') -eq 2")

# %% [markdown]
# No error, no warning: two trainings on all of the data, twice the cost, and both write the same checkpoint. It has happened
# to everybody who works on clusters. So **ask for the size of the world, and compare it with what was launched**. Ours does:

# %%
command = f"mpirun -n 2 env --unset=PMI_FD python -m mpi4py -m course_lib.train {' '.join(config.arguments())}"
shell(f"{command} 2>&1 | sort -u; test ${{PIPESTATUS[0]}} -eq 2")

# %% [markdown]
# ## On the cluster
#
# `slurm/09_mpi.sbatch` starts ranks on several nodes, by mpirun, which asks Slurm for the nodes, or by srun itself, which
# speaks the same protocol as MPICH if it is told to:
#
#     sbatch slurm/09_mpi.sbatch --epochs 5                       # mpirun
#     MPI_LAUNCH="srun --mpi=pmi2" sbatch slurm/09_mpi.sbatch     # srun; "srun --mpi=pmix" for Open MPI
#
# On your site use the MPI of the site, for it knows the network: `module load openmpi`, then `pip uninstall mpich` (or its
# mpirun stays the first that is found) and `pip install --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py`.
# Its mpirun may want other words for "two ranks on each node"; put them into `MPI_LAUNCH`. `python -m course_lib.doctor` tells
# whether two ranks find each other.
#
# ## Questions
#
# *A ring of 1,000 ranks needs 1,998 rounds. Why does anybody use it?*
#
# <details><summary>Answer</summary>
#
# For large arrays the rounds are short: each carries a thousandth. For small ones the latency of 1,998 messages is all that
# counts, and a tree wins with 20. Libraries choose by the size of the message, and by the network. Lesson 06 has both in one
# figure.
#
# </details>
#
# *You have `comm.bcast(model)` in a loop, in lower case. What happens in every step?*
#
# <details><summary>Answer</summary>
#
# Rank 0 pickles the whole model, all ranks receive a string of bytes and build a new model from it. Broadcast the
# parameters as buffers, once, before the loop.
#
# </details>
#
# *May the chunks of a message arrive in the wrong order?*
#
# <details><summary>Answer</summary>
#
# No. Between two ranks, with the same tag, messages are received in the order in which they were sent. Our ring relies on it.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    mpi_apart=apart["mpi"],
    ring_apart=apart["mpi_ring"],
    loss_lazy=ends["09_lazy"],
    loss_torchrun=ends["09_torchrun"],
)

# %% [markdown]
# ## What you have seen
#
# - A message needs both sides. Two blocking sends can lock, and only large ones show it; order, `Sendrecv` or `Isend` cure it.
# - Lower case pickles any object, upper case sends memory as it is.
# - A tree needs few rounds and suits small arrays; a ring keeps all links busy and sends 2(n − 1)/n of the array, at any n.
# - Whoever averages the gradients, MPI, a ring by hand or DDP, and whoever starts the ranks: the weights are the same.
# - The wrong launcher gives silent worlds of one. Compare the size of the world with what was launched.
#
# **Exercise:** [ex09](../exercises/ex09_mpi/ex09_mpi.ipynb), collectives made of messages.
#
# **Next:** [10 · Horovod](10_horovod.ipynb): the library that brought MPI's all-reduce to deep learning.
