# %% [markdown]
# # 03 · DataParallel: one process, several devices
#
# A batch has eight samples, and each is computed without looking at the others. So give half of them to a second device.
# The oldest way to do that in PyTorch is `DataParallel`. It takes one line, it is exact, and it stops scaling early. This
# lesson builds it, proves it, and finds out why it stops.
#
# After this lesson
#
# 1. you can say what scatter, replicate, apply and gather do, and have called each of them;
# 2. you have proved that two devices give the same gradients and the same weights as one;
# 3. you can predict what DataParallel costs in messages, in memory and in waiting for Python, and have measured it.
#
# **New since lesson 02:** the model is called through a wrapper. The training loop does not change at all.

# %% [markdown]
# Where there is no GPU, a *device* is a thread on a core of its own. The four steps and the result are the same; only the
# copies cost less, since all threads share one memory.

# %% tags=["parameters"]
data = "../data/years"
runs = "../runs"
devices = 2
width = 16
batch = 8
steps = 20  # of the two trainings that are compared
sizes = [4, 8, 16, 32, 64]  # images for the measurement of speed; the first must be tiny
repeats = 10  # timed steps for each of them

# %%
import torch

from course_lib import plots
from course_lib.config import Config
from course_lib.data.tasks import make_task
from course_lib.lesson import numbers, show
from course_lib.trainer import make_model

torch.set_num_threads(1)
config = Config(data=data, runs=runs, width=width, batch=batch, max_steps=steps, device="cpu", devices=devices)
task = make_task(config)
model = make_model(config, task)
x, y = (torch.stack(side) for side in zip(*(task.train[number] for number in range(batch))))
print("one batch:", tuple(x.shape), "→", tuple(y.shape))

# %% [markdown]
# ## Four steps
#
# | step | what moves | where to |
# |---|---|---|
# | **scatter** | the batch, cut into pieces | a piece to each device |
# | **replicate** | the weights | a copy to each device |
# | **apply** | nothing | every device computes, all at the same time |
# | **gather** | the outputs | back to the first device |
#
# First the pieces. *What shapes will come out for a batch of 8? And for 7?*

# %%
from course_lib.parallel.dp import DataParallel, gather, parallel_apply, replicate, scatter

pieces = scatter(x, devices)
print("a batch of 8:", [tuple(piece.shape) for piece in pieces])
print("a batch of 7:", [tuple(piece.shape) for piece in scatter(x[:7], devices)])

# %% [markdown]
# An odd batch is no problem: one device gets a sample more. Next, every device needs a model. We make the copies once, but
# their *weights* must be copied again before every step, because the optimizer has changed them. (PyTorch's own makes the
# copies themselves anew in every step.)

# %%
import copy

show(replicate)
replicas = [copy.deepcopy(model) for _ in range(devices)]
replicate(model, replicas[1:])

# %% [markdown]
# Now all devices compute at once. On a CPU that takes one thread per device.

# %%
import threading
from concurrent.futures import ThreadPoolExecutor


def forward(replica, piece):
    print(f"{threading.current_thread().name} has {len(piece)} samples\n", end="")
    return replica(piece)


pool = ThreadPoolExecutor(devices, thread_name_prefix="device")
outputs = parallel_apply(pool, forward, replicas, pieces)

# %% [markdown]
# The last step puts the outputs side by side again. What comes out must be what one device says about the whole batch:

# %%
output = gather(outputs)
torch.testing.assert_close(output, model(x), rtol=0, atol=1e-6)
print("gathered", tuple(output.shape), "equal to one device")

# %% [markdown]
# *Why is that exact only because of GroupNorm? What would BatchNorm do?*
#
# <details><summary>Answer</summary>
#
# GroupNorm looks at one sample at a time. BatchNorm takes the mean over the samples *that a device sees*: four instead of
# eight. Its output, and so everything after it, would differ from that of one device. Lesson 04 measures by how much.
#
# </details>
#
# ## And backwards
#
# The loss is computed on the first device from the gathered output. Its gradient goes back the same way: cut into pieces,
# a backward pass on each device, and then the gradients of all copies are **added up** on the first device. Adding is
# right because a loss over a batch is a sum over its samples; the division by the batch is in it already.
#
# These are the four steps as the library has them, and the sum on the way back:

# %%
from course_lib.parallel import dp

show(DataParallel.run, dp.reduce)

# %% [markdown]
# ## Prove it
#
# One device and several, from the same weights, on the same batches, for five steps of the same `train_step` that lesson
# 01 has used. First the gradients of a single step, then the weights after all five.
#
# Proofs are made in double precision. A UNet is full of choices: ReLU asks whether a number is above zero, pooling which of
# four is the largest. Where two are nearly equal, rounding alone tips the choice, and a gradient takes another way. With 7
# digits that happens every now and then, on one processor and not on the next; with 16 digits hardly ever.

# %%
from torch.nn import functional as F

torch.nn.init.normal_(model.head.weight, std=0.1)  # it starts at zero, and most gradients with it: a poor test
precise, images, targets = copy.deepcopy(model).double(), x.double(), y.double()


def gradients(network) -> list[torch.Tensor]:
    network.zero_grad()
    F.mse_loss(network(images), targets).backward()
    return [parameter.grad for parameter in network.parameters()]


of_one, of_several = gradients(precise), gradients(DataParallel(copy.deepcopy(precise), devices))
torch.testing.assert_close(of_several, of_one, rtol=1e-9, atol=1e-12)
print(f"{len(of_one)} gradients are equal on 1 and on {devices} devices")

# %%
from course_lib.trainer import train_step


def train(network) -> dict:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        train_step(network, (images, targets), optimizer)
    return getattr(network, "module", network).state_dict()


one, several = train(copy.deepcopy(precise)), train(DataParallel(copy.deepcopy(precise), devices))
furthest = max((one[name] - several[name]).abs().max().item() for name in one)
assert furthest < 1e-10
print(f"after five steps the weights differ by at most {furthest:.1g}")

# %% [markdown]
# Not by zero: the same numbers were added up in another order, and computers round numbers. From here on, "equal" means
# this, with the tolerance stated.
#
# ## Use it
#
# In the trainer this strategy is a word. Two short training runs, one with it and one without:

# %%
from course_lib.trainer import fit

fitted = {name: fit(config.replace(strategy=name, name=f"03_{name}")) for name in ("single", "dp")}
losses = {name: run.metrics["loss"] for name, run in fitted.items()}
assert abs(losses["dp"] - losses["single"]) < 0.01 * losses["single"]
print(losses)

# %% [markdown]
# This was single precision again, and the choices of ReLU and pooling tip now and then: long training runs agree only roughly.
# On a node with GPUs the same word, `--strategy dp`, takes PyTorch's own `nn.DataParallel` over all GPUs of the node. In
# a program of your own it is one line, and that line has a trap: without GPUs it does *nothing*, and says nothing.

# %%
wrapped = torch.nn.DataParallel(model)
print("GPUs that nn.DataParallel will use here:", wrapped.device_ids)
if len(wrapped.device_ids) > 1:
    on_gpus = torch.nn.DataParallel(copy.deepcopy(model).cuda())
    torch.testing.assert_close(on_gpus(x.cuda()).cpu(), model(x), rtol=1e-3, atol=1e-4)

# %% [markdown]
# ## Why it stops scaling: 1. messages
#
# **Predict.** Let the weights be $P$ bytes, and let there be $n$ devices. In every step the first device sends $P$ to each of
# the others, and receives $P$ of gradients from each: $2(n-1)P$ goes through it, plus pieces and outputs. There is a better
# way, the *ring*: everybody passes pieces to the next one, sends $2P(n-1)/n$ and receives as much, never more than $4P$ in
# all. With two devices there is no difference.

# %%
parameters = sum(parameter.numel() for parameter in model.parameters())
weight_bytes = 4 * parameters
many = list(range(1, 17))
traffic = {
    "DataParallel, first device": (many, [2 * (n - 1) * weight_bytes / 1e6 for n in many]),
    "ring, every device": (many, [4 * weight_bytes * (n - 1) / n / 1e6 for n in many]),
}
plots.lines(traffic, xlabel="devices", ylabel="MB per step through a device", dashed=list(traffic))

# %% [markdown]
# A line that grows with the number of devices is the end of scaling. (On GPUs PyTorch lets NCCL pass the copies along, so
# the first device sends less; it still waits for all of them.) How much of a step does it cost already now? A
# `Timeline` notes when each of the four steps began and ended.

# %%
from course_lib.timeline import Timeline

timeline = Timeline()
watched = DataParallel(copy.deepcopy(model), devices, timeline)
optimizer = torch.optim.Adam(watched.parameters())
for _ in range(5):
    train_step(watched, (x, y), optimizer, span=timeline.span)
kinds = ["scatter", "replicate", "apply", "gather", "reduce", "update"]
plots.timelines({f"{devices} devices, two steps": timeline}, step="update", skip=1, steps=3, kinds=kinds)

# %% [markdown]
# In the row `apply`, every step has two bars: forward and backward, on all devices at once. `replicate` comes before each
# forward, `reduce` after each backward, and then the first device updates the weights alone. On one machine with a small
# net these are thin. They grow with the net and with the number of devices, and while they last every device but the
# first has nothing to do.
#
# ## 2. One Python
#
# All devices are driven by one Python, and its lock, the GIL, lets one thread at a time decide what to compute next.
#
# **Predict.** A step takes $T = o + c$: $o$ to launch all operations (Python, and PyTorch's own bookkeeping), which does not
# depend on the image, and $c$ to compute them. On $n$ devices the computing is shared, but every device must launch *all*
# operations on its piece. At worst that happens one device at a time:
#
# $$T_n = n \cdot o + c / n$$
#
# We find $o$ by giving the net an image so tiny that there is hardly anything to compute.

# %%
import time


def seconds_per_step(network, size: int) -> float:
    """The fastest of several steps: the least disturbed by others."""
    small = x[..., :size, :size].contiguous(), y[..., :size, :size].contiguous()
    optimizer, taken = torch.optim.SGD(network.parameters(), lr=0.0), []
    for _ in range(repeats):
        start = time.perf_counter()
        train_step(network, small, optimizer)
        taken.append(time.perf_counter() - start)
    return min(taken)


spread = DataParallel(copy.deepcopy(model), devices)
alone = [seconds_per_step(model, size) for size in sizes]
shared = [seconds_per_step(spread, size) for size in sizes]

# %%
launching = alone[0]
expected = [t / (devices * launching + (t - launching) / devices) for t in alone]
measured = [t / on_devices for t, on_devices in zip(alone, shared)]
speedups = {"predicted": (sizes, expected), "measured": (sizes, measured), "ideal": (sizes, [devices] * len(sizes))}
plots.lines(speedups, xlabel="image size (grid points)", ylabel="speed-up", dashed=["predicted", "ideal"])
print(f"launching takes {launching * 1e3:.1f} ms of a step of {alone[-1] * 1e3:.0f} ms with the largest image")

# %% [markdown]
# Where the line is below 1, two devices are *slower* than one: nearly all of the step is launching, and now there is twice
# as much of it. (At the first point the prediction is ½ by construction.) With large images launching is a small part, and
# the speed-up comes nearer to the number of devices. A GPU computes perhaps a hundred times as fast as this core, while one
# Python must launch for all of them: there, most images are small.
#
# *What would remove this limit?*
#
# <details><summary>Answer</summary>
#
# A Python for each device: one process per device, each with a lock of its own. That is what DDP does.
#
# </details>
#
# ## 3. Memory of the first device
#
# **Predict.** Every device holds weights ($P$), gradients ($P$) and the activations of its piece. The first one also holds the
# state of Adam ($2P$), the gathered output of the whole batch and its gradient.

# %%
from course_lib.unet import count_activations, count_parameters, measure_activations

height, length = x.shape[-2:]
activations = count_activations(task.inputs, size=(height, length), width=width, depth=config.depth, padding="circular")
per_piece = len(pieces[0]) * activations
outputs_bytes = 2 * batch * task.outputs * height * length * 4
predicted = {"first device": 4 * weight_bytes + per_piece + outputs_bytes, "every other": 2 * weight_bytes + per_piece}

# %%
optimizer = torch.optim.Adam(spread.parameters())
train_step(spread, (x, y), optimizer)
first = sum(parameter.nbytes + parameter.grad.nbytes for parameter in spread.module.parameters())
first += sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
first += measure_activations(spread.replicas[0], pieces[0]) + 2 * spread(x).nbytes
other = 2 * sum(parameter.nbytes for parameter in spread.replicas[1].parameters())  # and as much for the gradients
other += measure_activations(spread.replicas[1], pieces[1])
found = {"first device": first, "every other": other}
megabytes = {
    name: {k: v / 1e6 for k, v in values.items()} for name, values in (("predicted", predicted), ("counted", found))
}
plots.grouped_bars(megabytes, ylabel="memory per device (MB)")
assert all(abs(found[name] - predicted[name]) < 0.1 * predicted[name] for name in found)

# %% [markdown]
# This net is small and the batch is large, so activations dominate and the difference is small. For a large net it is
# not. The same formula for a UNet of width 64 and depth 4, with one sample on each device:

# %%
big = 4 * count_parameters(6, 6, width=64, depth=4)
big_sample = count_activations(6, size=(height, length), width=64, depth=4)
print(f"first device {(4 * big + big_sample) / 1e6:.0f} MB, every other {(2 * big + big_sample) / 1e6:.0f} MB")

# %% [markdown]
# The largest batch is decided by the first device; on all the others, memory that was paid for stays empty.
#
# ## On the cluster
#
# One process on one node, with all its GPUs. It can't use a second node at all: threads don't reach that far.
#
#     sbatch --gpus-per-node=4 slurm/03_data_parallel.sbatch --batch 32
#
# With DataParallel `--batch` is the batch of *all* devices together: with the default of 8, four GPUs get two samples each.
#
# ## Questions
#
# *DataParallel needs no launcher and no second process. When is it still a good choice?*
#
# <details><summary>Answer</summary>
#
# For evaluating or applying a net on the GPUs of one node: there are no gradients to reduce, and the weights never change.
# For training, PyTorch's own documentation recommends DDP, even on one node.
#
# </details>
#
# *The gradients of the copies are added up. When would one have to average them?*
#
# <details><summary>Answer</summary>
#
# If every device computed the mean loss of *its own piece*. Then each piece's mean would count fully, and with pieces of
# unequal length even the average would be wrong: a sample in a short piece would count for more. In lesson 04 every rank
# has a loss of its own, and this question comes back.
#
# </details>
#
# ## Numbers of this run

# %%
numbers(
    parameters=parameters,
    gradients_compared=len(of_one),
    loss_one_device=losses["single"],
    loss_data_parallel=losses["dp"],
    first_device_mb=found["first device"] / 1e6,
    other_device_mb=found["every other"] / 1e6,
)

# %% [markdown]
# ## What you have seen
#
# - DataParallel is four steps: scatter the batch, replicate the weights, apply on all devices, gather the outputs.
# - Backwards the gradients of all copies are added up, and the result equals that of one device.
# - All weights and all gradients go through the first device in every step: its traffic grows with the number of devices.
# - One Python drives all devices; with small work it makes them slower than one.
# - The first device needs the most memory and decides the batch for all.
#
# **Exercise:** [ex03](../exercises/ex03_data_parallel/ex03_data_parallel.ipynb), one batch, several devices.
#
# **Next:** [04 · DDP](04_ddp.ipynb), one process per device, without a first one.
