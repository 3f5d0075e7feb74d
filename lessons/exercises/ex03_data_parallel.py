# %% [markdown]
# # Exercise 03 · One batch, several devices
#
# In lesson 03 a batch was cut into pieces, each device computed one, and the first device put the outputs together. Here you
# write these steps yourself, and the way back, on which the gradients are added up. A device is a thread, as in the lesson; in
# the last task it is a process, and pieces are sent. Each check compares what several devices give with what one device says
# about the whole batch.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens it.
# A check that fails says in which element, and what it looks like; `print` works, too. A call that never comes back is stopped
# after five seconds, and you are told where it was. Stuck? Each task has three hints; open them one at a time.

# %%
import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib import plots
from course_lib.checks import alone, on_ranks, prepare, require, same
from course_lib.parallel import dp

torch.set_num_threads(1)
prepare("torch.fx.experimental.symbolic_shapes")  # backward(gradient) imports it: once, not on every rank

# %% [markdown]
# ## 1 · Scatter
#
# Cut a batch along its first dimension into a piece for each device, in order. The pieces are as even as can be: no two
# differ by more than one sample, and the longer ones come first. A batch with fewer samples than devices gives as many
# pieces as it has samples: nobody gets an empty piece.


# %% solution="scatter"
def scatter(batch: torch.Tensor, devices: int) -> list[torch.Tensor]:
    """A piece of the batch for each device."""
    ### BEGIN SOLUTION
    return list(batch.tensor_split(min(devices, len(batch))))
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many pieces are there? And of these, how many have a sample more than the others? `divmod` knows.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `batch.split([3, 2, 2])` cuts a batch of seven into pieces of these lengths. `batch.chunk(3)` is not what you want: it
# rounds the length of a piece up, and the last one gets what is left.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `batch.tensor_split(pieces)` cuts as evenly as can be, with the longer ones first. `pieces` is the smaller of `devices` and
# `len(batch)`.
#
# </details>
#
# A batch of seven images on three devices; the titles say where each should go:

# %%
images = [np.arange(64).reshape(8, 8) % (number + 2) for number in range(7)]
titles = [f"device {device}" for device, piece in enumerate(np.array_split(range(7), 3)) for _ in piece]
plots.thumbnails(np.stack(images), titles, columns=7)


# %% check="scatter" points=2
def check_scatter(samples: int, devices: int) -> None:
    batch = torch.arange(samples * 6).reshape(samples, 3, 2)
    got = alone(lambda: scatter(batch, devices))
    pieces, size = min(devices, samples), samples // devices
    mistakes = {
        "right, and empty pieces: a device without samples has nothing to do": list(batch.tensor_split(devices)),
        "pieces rounded up, as torch.chunk cuts: the last device gets less": list(batch.chunk(devices)),
        "a batch that has lost its last samples": [batch[d * size : (d + 1) * size] for d in range(devices)],
        "dealing like cards: gathered, the outputs would be in another order": [
            batch[d::devices] for d in range(devices)
        ],
        "the longer pieces at the end: they come first": [
            piece.flip(0) for piece in batch.flip(0).tensor_split(pieces)[::-1]
        ],
        "pieces rounded down, and one too many for the rest": list(batch.split(max(1, size))),
        "a cut through another dimension than the first": list(batch.tensor_split(devices, dim=1)),
    }
    same(got, list(batch.tensor_split(pieces)), f"{samples} samples on {devices} devices", mistakes=mistakes)


check_scatter(7, 3)
check_scatter(10, 4)
check_scatter(2, 4)
### BEGIN HIDDEN TESTS
check_scatter(9, 3)
check_scatter(6, 5)
check_scatter(1, 2)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · Apply and gather
#
# Call replica 0 with piece 0, replica 1 with piece 1 and so on, all at the same time, each on a thread of its own.
# Return one tensor: their outputs joined along the first dimension, in the order of the pieces, whichever was ready
# first. There may be fewer pieces than replicas; then the last replicas have nothing to do. If a replica fails, its
# error must reach whoever called: on a bare `threading.Thread` it would get lost.


# %% solution="apply"
def apply_all(replicas: Sequence[Callable], pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """What all replicas say about their pieces, computed at the same time."""
    ### BEGIN SOLUTION
    with ThreadPoolExecutor(len(pieces)) as threads:
        outputs = threads.map(lambda replica, piece: replica(piece), replicas, pieces)
        return torch.cat(list(outputs))
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `with ThreadPoolExecutor(n) as threads:` gives you n threads. `threads.submit(function, argument)` starts a call and comes
# back at once, with a *future* for the result.
#
# </details>
# <details><summary>Hint 2</summary>
#
# First start all calls, then ask for the results: `future.result()` waits, and raises what the call has raised. If you ask
# the futures in the order in which you started them, the outputs are in order, too.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `futures = [threads.submit(replica, piece) for replica, piece in zip(replicas, pieces)]`, then
# `torch.cat([future.result() for future in futures])`.
#
# </details>
#
# Three replicas that sleep for 30 ms instead of computing. On three threads it should take about a third of the time:


# %%
def sleep(replica, piece):
    time.sleep(0.03)


begin = time.perf_counter()
for number in range(3):
    sleep(number, number)
middle = time.perf_counter()
with ThreadPoolExecutor(3) as pool:
    dp.parallel_apply(pool, sleep, range(3), range(3))
took = {"one after the other": middle - begin, "at the same time": time.perf_counter() - middle}
plots.bars({name: 1e3 * seconds for name, seconds in took.items()}, xlabel="milliseconds")


# %% check="apply" points=3
def check_apply(devices: int, samples: int) -> None:
    pieces = torch.arange(samples * 2.0).reshape(samples, 2).tensor_split(min(devices, samples))

    def run():
        meeting, alone_there = threading.Barrier(len(pieces)), []

        def replica(number, piece):
            try:
                meeting.wait(2)  # until all replicas are here
            except threading.BrokenBarrierError:
                alone_there.append(number)
            time.sleep(0.02 * (devices - number))  # the first one is ready last
            return number - piece

        calls = [lambda piece, number=number: replica(number, piece) for number in range(devices)]
        return apply_all(calls, pieces), alone_there

    got, alone_there = alone(run)
    what = f"{len(pieces)} pieces on {devices} devices"
    why = f"replicas {alone_there} waited two seconds for the others. Start all calls before you ask for a result"
    require(not alone_there, f"at the same time, {what}", why)
    outputs = [number - piece for number, piece in enumerate(pieces)]
    mistakes = {
        "the order in which the outputs were ready: keep that of the pieces": torch.cat(outputs[::-1]),
        "the output of the first replica alone": outputs[0],
        "every piece computed by the first replica": torch.cat([0 - piece for piece in pieces]),
    }
    same(got, torch.cat(outputs), f"the outputs, {what}", mistakes=mistakes)


def check_failure(devices: int, broken: int) -> None:
    def fail(piece):
        raise ValueError(f"device {broken} is gone")

    def run():
        replicas = [fail if device == broken else torch.neg for device in range(devices)]
        try:
            apply_all(replicas, torch.ones(devices, 1).split(1))
        except ValueError as error:
            return str(error)
        return "no error"

    lost = {"an error that stayed in its thread: `future.result()` would raise it": "no error"}
    same(alone(run), f"device {broken} is gone", f"replica {broken} of {devices} fails", mistakes=lost)


check_apply(3, 7)
check_failure(3, 1)
### BEGIN HIDDEN TESTS
check_apply(4, 2)
check_apply(2, 9)
check_failure(2, 0)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · Gradients of the whole batch
#
# Now the way back. `loss_function(output, target)` wants the output of the whole batch, as if there were one device.
# Return its gradient for each parameter, in the order of a replica's `parameters()`: what all replicas found, added up.
# The loss may be any function of the whole output, so the losses of single pieces are of no use. Replicas are equal
# copies of the model; those without a piece find nothing. They may compute one after the other here.


# %% solution="gradients"
def gradients(
    replicas: Sequence[nn.Module], pieces: Sequence[torch.Tensor], target: torch.Tensor, loss_function: Callable
) -> list[torch.Tensor]:
    """One gradient a parameter, as one device with the whole batch would find it."""
    ### BEGIN SOLUTION
    used = replicas[: len(pieces)]
    output = torch.cat([replica(piece) for replica, piece in zip(used, pieces)])
    loss_function(output, target).backward()
    found = [[parameter.grad for parameter in replica.parameters()] for replica in used]
    return [sum(parts) for parts in zip(*found)]
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Gather first, then compute one loss from the gathered output. `torch.cat` is part of the graph: `backward` finds its way
# through it to every replica by itself.
#
# </details>
# <details><summary>Hint 2</summary>
#
# After `backward` each replica has its own `parameter.grad`, of its own piece. The division by the whole batch is in the loss
# already, so they are added, not averaged. A replica without a piece has `None` there.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `output = torch.cat([replica(piece) for replica, piece in zip(replicas, pieces)])`, then
# `loss_function(output, target).backward()`. With `found` a list of each used replica's gradients, return
# `[sum(parts) for parts in zip(*found)]`.
#
# </details>
#
# The gradient of a layer with 8 × 12 weights, from five samples on two devices. The sum of what the two found is what one
# device finds:

# %%
torch.manual_seed(0)
layers = [layer := nn.Linear(12, 8), copy.deepcopy(layer), copy.deepcopy(layer)]
x, y = torch.randn(5, 12), torch.randn(5, 8)
F.mse_loss(torch.cat([layers[0](x[:3]), layers[1](x[3:])]), y).backward()
F.mse_loss(layers[2](x), y).backward()
device_0, device_1, whole = (layer.weight.grad.numpy() for layer in layers)
plots.fields(
    {"device 0": device_0, "device 1": device_1, "their sum": device_0 + device_1, "one device": whole},
    units="gradient",
)


# %% check="gradients" points=3
def root(output, target):
    """A loss that is no mean over samples."""
    return F.mse_loss(output, target).sqrt()


def check_gradients(devices: int, samples: int, loss_function: Callable) -> None:
    torch.manual_seed(samples)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x, y = torch.randn(samples, 3), torch.randn(samples, 2)
    parts = [piece.tensor_split(min(devices, samples)) for piece in (x, y)]

    def of(loss):
        return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)

    wanted = of(loss_function(model(x), y))  # one device
    own = [loss_function(model(a), b) for a, b in zip(*parts)]
    outputs = [model(piece) for piece in parts[0]]
    first = of(loss_function(torch.cat([outputs[0], *(output.detach() for output in outputs[1:])]), y))
    mistakes = {
        "the mean of the pieces' own losses: a sample in a short piece counts for more": of(sum(own) / len(own)),
        "the sum of the pieces' own losses: there is one loss, of the whole output": of(sum(own)),
        "the pieces' own losses, weighted by their length: right for a mean over samples only": of(
            sum(loss * len(piece) / samples for loss, piece in zip(own, parts[0]))
        ),
        "the average over the replicas: the loss has been divided already, so add": [g / len(own) for g in wanted],
        "the average over all replicas, even those without a piece: add": [g / devices for g in wanted],
        "what the first replica found, without the others": first,
    }

    def run():
        replicas, seen = [copy.deepcopy(model) for _ in range(devices)], {}
        for number, replica in enumerate(replicas):
            name = f"replica {number}"
            replica.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: len(output)}))
        return gradients(replicas, parts[0], y, loss_function), seen

    got, seen = alone(run)
    what = f"{samples} samples on {devices} devices, loss {loss_function.__name__}"
    same(got, list(wanted), f"gradients, {what}", mistakes=mistakes)
    shared = {f"replica {number}": len(piece) for number, piece in enumerate(parts[0])}
    same(seen, shared, f"samples that each replica computed, {what}")


check_gradients(2, 5, F.mse_loss)
check_gradients(3, 7, root)
check_gradients(4, 2, F.mse_loss)
### BEGIN HIDDEN TESTS
check_gradients(4, 9, F.mse_loss)
check_gradients(2, 4, root)
check_gradients(3, 1, root)
### END HIDDEN TESTS

# %% [markdown]
# ## 4 · With messages
#
# Threads share their memory, processes do not: what another one should have must be sent. Rank 0 has the batch, on the other
# ranks `batch` is `None`; all have the same `model`. Rank r computes `lengths[r]` samples, in order, and everybody knows
# `lengths`. Rank 0 gives each rank its piece, and computes one itself. It returns the outputs of all, in order; the others
# return `None`. The pieces are uneven, so `dist.scatter` and `dist.gather`, which want them equal, will not do as they are:
# `dist.send(tensor, rank)` sends a tensor of any length, and `dist.recv(tensor, rank)` fills one that you have made. As in
# lesson 00, `dist.get_rank()` says which rank you are. Only the forward pass is asked for: no gradient travels.


# %% solution="messages"
def forward(model: nn.Linear, batch: torch.Tensor | None, lengths: list[int]) -> torch.Tensor | None:
    """The model's outputs for the whole batch, on rank 0. batch: (sample, model.in_features), on rank 0."""
    ### BEGIN SOLUTION
    rank = dist.get_rank()
    others = range(1, len(lengths))
    if rank > 0:
        piece = torch.empty(lengths[rank], model.in_features)
        dist.recv(piece, 0)
        dist.send(model(piece), 0)
        return None
    pieces = batch.split(lengths)
    for other in others:
        dist.send(pieces[other], other)
    outputs = [model(pieces[0]), *(torch.empty(lengths[other], model.out_features) for other in others)]
    for other in others:
        dist.recv(outputs[other], other)
    return torch.cat(outputs)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `recv` fills a tensor that is there already: `torch.empty(samples, features)`. How many of each has a piece, and how many
# has an output?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Each message has a `send` on one side and a `recv` on the other. Rank 0 sends all pieces before it computes its own: then the
# others compute at the same time, instead of one after the other. Nobody sends to himself.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Rank r > 0: `piece = torch.empty(lengths[r], model.in_features)`, receive it from rank 0, send `model(piece)` to rank 0. Rank
# 0: `pieces = batch.split(lengths)`, send `pieces[r]` to each r > 0; compute `model(pieces[0])`; receive from each r > 0, in
# order, a tensor of `(lengths[r], model.out_features)`; join all with `torch.cat`.
#
# </details>
#
# Six samples on three ranks, the first half of the task. The outputs go the same way back.

# %%
samples = [0, 1, 2, 3, 4, 5]
plots.collective("sending pieces", [samples, [], []], [samples[:3], samples[3:5], samples[5:]])


# %% check="messages" points=3
def check_messages(*lengths: int) -> None:
    ranks = len(lengths)
    torch.manual_seed(sum(lengths))
    batch, model = torch.randn(sum(lengths), 3), nn.Linear(3, 2)

    def run(rank):
        seen = []
        model.register_forward_hook(lambda _, inputs, output: seen.append(len(output)))
        output = forward(model, batch if rank == 0 else None, list(lengths))
        return output if output is None else output.detach(), sum(seen)

    found, what = on_ranks(ranks, run), f"{lengths} samples on {ranks} ranks"
    wanted = model(batch).detach()  # one process
    outputs, nobody = wanted.split(lengths), [None] * (ranks - 1)
    mistakes = {
        "rank 0's own outputs, without those of the others": [outputs[0], *nobody],
        "the outputs in the order of the ranks, backwards": [torch.cat(outputs[::-1]), *nobody],
        "the batch itself: has the model seen it?": [batch, *nobody],
        "the outputs on every rank: only rank 0 is to return them": [wanted] * ranks,
        "each rank's own outputs: rank 0 is to return all of them": list(outputs),
        "right on rank 0, and each other rank's own outputs, where None is expected": [wanted, *outputs[1:]],
    }
    same([got for got, _ in found], [wanted, *nobody], f"the outputs, {what}", ranks=True, mistakes=mistakes)
    alone_there = {"all of them on rank 0: the others should have their share": [sum(lengths), *[0] * (ranks - 1)]}
    counted = [count for _, count in found]
    same(counted, list(lengths), f"samples that each rank computed, {what}", ranks=True, mistakes=alone_there)


check_messages(3, 2)
check_messages(3, 2, 2)
### BEGIN HIDDEN TESTS
check_messages(1, 4, 2)
check_messages(3, 3, 2, 2)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `course_lib/parallel/dp.py` has the first three: `scatter`, `parallel_apply`, `gather` and `reduce`, and `DataParallel`, which
# puts them together. There the backward passes run on threads, too. For that it cuts the gradient of the output into pieces
# again. DDP, in lesson 04, spares itself the messages of task 4: every process reads its own piece.
#
# *In your third function `backward` walks through all replicas one after the other. Which line would you have to give up to
# change that?*
#
# **Next:** [04 · DDP](../../notebooks/04_ddp.ipynb).
