# %% [markdown]
# # Exercise 01 · A large batch, and what a layer costs
#
# In lesson 01 memory was full of activations, and they grow with the batch. Here you write the oldest remedy, which needs one
# device only: a large batch in small pieces, with the same result. Then you predict with a pencil what a convolution costs in
# parameters and in arithmetic, and what a chain of them keeps. Each check compares your answer with one step on the whole
# batch, or with what PyTorch itself counts.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens
# it. A check that fails says what differs, and what it looks like; `print` works, too. A call that never comes back is
# stopped after five seconds, and you are told where it was. Stuck? Each task has three hints; open them one at a time.

# %%
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from course_lib import plots
from course_lib.checks import alone, prepare, require, same
from course_lib.unet import measure_activations

torch.set_num_threads(1)
prepare("torch._dynamo")  # optimizers import it: once, not on every rank

# %% [markdown]
# ## 1 · Accumulate gradients
#
# The batch does not fit, so it comes as a list of *micro-batches* `(x, y)`, not all equally long. Make one step of the
# optimizer, the same as with the whole batch. `loss_function(model(x), y)` is the mean over the samples of a micro-batch; you
# need the mean over all samples. Never hold the activations of two micro-batches: `backward` frees them, and adds to the
# gradients that are there. Those of an earlier step may still be there, too.


# %% solution="accumulate"
def accumulate(
    model: nn.Module, loss_function: Callable, batches: Sequence[tuple], optimizer: torch.optim.Optimizer
) -> None:
    """One step with all micro-batches."""
    ### BEGIN SOLUTION
    samples = sum(len(x) for x, _ in batches)
    optimizer.zero_grad()
    for x, y in batches:
        loss = loss_function(model(x), y) * len(x) / samples
        loss.backward()
    optimizer.step()
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A step is `zero_grad`, forward, loss, `backward`, `step`. Which of them happen once, and which for each micro-batch?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Clear before the loop, step after it. In between the gradients add up, so each loss must be the micro-batch's *share* of the
# whole loss. A micro-batch with 5 of 9 samples contributes 5/9 of its mean.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `samples = sum(len(x) for x, _ in batches)`. In the loop: `loss = loss_function(model(x), y) * len(x) / samples`, then
# `loss.backward()`.
#
# </details>
#
# A model with one weight and nine samples in three micro-batches. What the three add is together the gradient of all nine;
# the mean of the three means is something else:

# %%
one_weight = torch.tensor(1.0, requires_grad=True)
x, y = torch.arange(1.0, 10.0), torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0])
pieces = list(zip(x.split([5, 3, 1]), y.split([5, 3, 1])))
slopes = [torch.autograd.grad((one_weight * a - b).square().mean(), one_weight)[0].item() for a, b in pieces]
shown = {f"micro-batch of {len(a)}, × {len(a)}/9": slope * len(a) / 9 for (a, _), slope in zip(pieces, slopes)}
shown["their sum"] = sum(shown.values())
shown["all nine at once"] = torch.autograd.grad((one_weight * x - y).square().mean(), one_weight)[0].item()
shown["mean of the three means"] = sum(slopes) / 3
plots.bars(shown, xlabel="gradient of the weight")


# %% check="accumulate" points=3
def make(log: list):
    """A model and an optimizer that write down what is done with them. A gradient of long ago is still there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    model(torch.ones(1, 3)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def note(module, inputs, output):
        log.append(f"forward of {len(output)}")
        if output.requires_grad:
            output.register_hook(lambda _: log.append("first backward" if is_clear() else "backward"))

    def is_clear():
        return all(p.grad is None or not p.grad.any() for p in model.parameters())

    model.register_forward_hook(note)
    optimizer.register_step_pre_hook(lambda *_: log.append("step"))
    return model, optimizer


def by_hand(batches, weights):
    """The parameters after two steps, in which each batch's mean loss has a weight."""
    model, optimizer = make([])
    for _ in range(2):
        optimizer.zero_grad()
        sum(F.mse_loss(model(x), y) * weight for (x, y), weight in zip(batches, weights)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def check_calls(log: list, sizes: tuple, what: str) -> None:
    """Of two steps."""
    steps, calls = log.count("step") / 2, [call.removeprefix("first ") for call in log]
    why = f"optimizer.step() was called {steps:g} times in a call; it belongs after the loop"
    require(steps == 1, f"one step, {what}", why)
    done = ", ".join(calls[: calls.index("step")]) or "no forward at all"
    why = f"{done}. Each micro-batch should have a forward and, before the next one, its backward"
    plan = [call for size in sizes for call in (f"forward of {size}", "backward")] + ["step"]
    require(calls == plan * 2, f"forward and backward, {what}", why)
    clear = [call == "first backward" for call in log if "backward" in call]
    why = "gradients of an earlier step are still there at the first backward: clear them before the loop"
    require(clear[0] and clear[len(sizes)], f"a fresh start, {what}", why)
    why = "gradients are cleared between two micro-batches, and the sum is lost: zero_grad belongs before the loop"
    require(sum(clear) == 2, f"gradients add up, {what}", why)


def check_accumulate(*sizes: int) -> None:
    noise, count, what = torch.Generator().manual_seed(1), len(sizes), f"micro-batches of {sizes}"
    batches = [(torch.randn(size, 3, generator=noise), torch.randn(size, 2, generator=noise)) for size in sizes]

    def run():
        model, optimizer = make(log := [])
        for _ in range(2):
            accumulate(model, F.mse_loss, batches, optimizer)
        return log, list(model.parameters())

    log, got = alone(run)
    check_calls(log, sizes, what)
    mistakes = {
        "the mean of the means: a sample of a short micro-batch counts for more": by_hand(batches, [1 / count] * count),
        "the sum of the means: each counts fully": by_hand(batches, [1] * count),
        "the sum over the samples: divide by their number": by_hand(batches, sizes),
        "the means divided by the number of all samples: multiply each by that of its own": by_hand(
            batches, [1 / sum(sizes)] * count
        ),
        "each mean divided by its own number of samples: it is a mean already": by_hand(
            batches, [1 / size for size in sizes]
        ),
    }
    wanted = by_hand([tuple(map(torch.cat, zip(*batches)))], [1])  # the whole batch at once
    same(got, wanted, f"the weights after two steps, {what}", mistakes=mistakes)


check_accumulate(5, 3, 1)
### BEGIN HIDDEN TESTS
check_accumulate(4, 4)
check_accumulate(1, 2, 3, 6)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · What a convolution costs
#
# A convolution has a window of `kernel` × `kernel`, and reads all `inputs` channels in it for every one of its
# `outputs` channels. Return its number of parameters, with a bias for each output channel, and its multiply-adds for
# one image of `size` (height, width), without those of the bias. The image is padded, so with `stride` 1 the output is
# as large as the input. With a larger stride the window moves `stride` points at a time: rows and columns are each
# divided by it, rounded up.


# %% solution="cost"
def conv_cost(inputs: int, outputs: int, *, kernel: int, size: tuple[int, int], stride: int = 1) -> tuple[int, int]:
    """(parameters, multiply-adds) of a 2-d convolution with padding and bias."""
    ### BEGIN SOLUTION
    weights = inputs * outputs * kernel**2
    rows, columns = (-(-length // stride) for length in size)
    return weights + outputs, weights * rows * columns
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many weights does one output channel have? It looks at a window in *every* input channel.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `inputs * outputs * kernel**2` weights, and `outputs` biases. For one point of the output, each weight is multiplied with
# one value and added, once. How many points has the output?
#
# </details>
# <details><summary>Hint 3</summary>
#
# Rounded up, `length` divided by `stride` is `-(-length // stride)`. The multiply-adds are the weights, without the biases,
# times rows times columns of the output.
#
# </details>
#
# From 16 to 32 channels on an image of 64 × 64, as PyTorch counts it (it counts a multiply-add as two operations):


# %%
def count(inputs, outputs, *, kernel, size, stride=1):
    """By torch, without computing anything: a tensor on "meta" has a shape and no values."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, device="meta")
    with FlopCounterMode(display=False) as counter:
        layer(torch.empty(1, inputs, *size, device="meta"))
    return sum(parameter.numel() for parameter in layer.parameters()), counter.get_total_flops() // 2


layers = {"1 × 1": (1, 1), "3 × 3": (3, 1), "5 × 5": (5, 1), "3 × 3, stride 2": (3, 2)}
found = {name: count(16, 32, kernel=k, size=(64, 64), stride=s)[1] / 1e6 for name, (k, s) in layers.items()}
plots.bars(found, xlabel="million multiply-adds for one image")


# %% check="cost" points=2
def check_cost(inputs: int, outputs: int, **how) -> None:
    got = alone(lambda: conv_cost(inputs, outputs, **how))
    wanted = count(inputs, outputs, **how)
    area, stride, kernel = how["size"][0] * how["size"][1], how.get("stride", 1), how["kernel"]
    weights = wanted[0] - outputs
    mistakes = {
        "right but for the biases: one for each output channel": (weights, wanted[1]),
        "right, but with biases counted in the multiply-adds": (wanted[0], wanted[1] // weights * wanted[0]),
        "counted at the input's points: with a stride the output has fewer": (wanted[0], weights * area),
        "rounded down: the output has the input's rows and columns divided by the stride, rounded up": (
            wanted[0], weights * (how["size"][0] // stride) * (how["size"][1] // stride),
        ),
        "rounded up once, for all points: rows and columns are each rounded up": (
            wanted[0], weights * -(-area // stride**2),
        ),
        "a division of all points by the stride: rows and columns are each divided": (
            wanted[0], weights * -(-area // stride),
        ),
        "a window of one row: it has `kernel` rows and `kernel` columns": (
            weights // kernel + outputs, wanted[1] // kernel,
        ),
        "one output channel only: each has its own weights and bias": (
            inputs * kernel**2 + 1, wanted[1] // outputs,
        ),
        "a window in one input channel only: each output channel reads all of them": (
            outputs * kernel**2 + outputs, wanted[1] // inputs,
        ),
        "two operations for each multiply-add: count the pair as one": (wanted[0], 2 * wanted[1]),
        "right, but a float: counts are whole numbers, so divide with //": (wanted[0], float(wanted[1])),
    }  # fmt: skip
    same(got, wanted, f"{inputs} to {outputs} channels, {how}: (parameters, multiply-adds)", mistakes=mistakes)


check_cost(16, 32, kernel=3, size=(64, 64))
check_cost(6, 16, kernel=5, size=(9, 15), stride=2)
### BEGIN HIDDEN TESTS
check_cost(1, 7, kernel=1, size=(3, 20))
check_cost(5, 4, kernel=3, size=(10, 11), stride=3)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · What a chain keeps
#
# A chain of 3 × 3 convolutions has a ReLU between any two of them, and none at the end. `channels` [6, 16, 3] means two
# convolutions, 6 to 16 and 16 to 3. How many bytes does forward keep for backward, parameters aside? A convolution keeps what
# it reads: its weights' gradient needs it. A ReLU keeps what it gives. What two layers keep lies in memory once. The last
# output nobody keeps. Values have four bytes.


# %% solution="kept"
def kept_bytes(channels: Sequence[int], *, size: tuple[int, int], batch: int) -> int:
    """Bytes that a batch of images leaves in memory between forward and backward."""
    ### BEGIN SOLUTION
    return 4 * batch * size[0] * size[1] * sum(channels[:-1])
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Write the chain down: x, convolution, ReLU, convolution. Mark what is kept, and by which layer. Is anything marked twice?
#
# </details>
# <details><summary>Hint 2</summary>
#
# What a ReLU gives is what the next convolution reads: one tensor, kept once. What a convolution gives is read by a
# ReLU, which does not need it (in lesson 01 a normalisation stood between them, and kept it). So the kept tensors are
# what the convolutions read.
#
# </details>
# <details><summary>Hint 3</summary>
#
# The convolutions read all entries of `channels` but the last. Each channel has `size[0] * size[1]` values a sample, each
# value four bytes.
#
# </details>
#
# Measured, as in lesson 01, for two chains on images of 32 × 32. The lines go through zero: no batch, nothing kept.


# %%
def measure(channels, *, size, batch):
    """What autograd puts aside in a real forward pass."""
    layers = [layer for a, b in zip(channels, channels[1:]) for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
    return measure_activations(nn.Sequential(*layers[:-1]), torch.randn(batch, channels[0], *size))


chains = [6, 16, 6], [6, 16, 16, 16, 6]
found = {str(chain): [measure(chain, size=(32, 32), batch=b) / 1e6 for b in range(5)] for chain in chains}
plots.lines({name: (range(5), y) for name, y in found.items()}, xlabel="batch (samples)", ylabel="kept (MB)")


# %% check="kept" points=2
def check_kept(channels: list[int], size: tuple[int, int], batch: int) -> None:
    got = alone(lambda: kept_bytes(channels, size=size, batch=batch))
    wanted = measure(channels, size=size, batch=batch)
    one = 4 * batch * size[0] * size[1]  # bytes of one channel
    mistakes = {
        "right, but a float: counts are whole numbers": float(wanted),
        "the number of values: each has four bytes": wanted // 4,
        "the bytes of one sample: multiply by the batch": wanted // batch,
        "right, and the last output with it: no layer needs that": wanted + one * channels[-1],
        "what the convolutions give: they keep what they read": one * sum(channels[1:]),
        "without the input: the first convolution reads it": wanted - one * channels[0],
        "what lies between two layers, counted twice: it is one tensor": wanted + one * sum(channels[1:-1]),
    }
    same(got, wanted, f"{channels} on {size}, batch {batch}: bytes", mistakes=mistakes)


check_kept([6, 16, 6], (32, 32), 4)
check_kept([3, 8, 8, 5, 1], (7, 12), 2)
### BEGIN HIDDEN TESTS
check_kept([4, 2], (5, 5), 3)
check_kept([2, 9, 3, 9, 2], (6, 4), 5)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `count_parameters` and `count_activations` in `course_lib/unet.py` are the formulas for the whole UNet, with normalisation
# and pooling, and `measure_activations` is what they are checked against. Accumulating comes back in lesson 07: a pipeline
# cuts its batch into micro-batches, too, and adds up their gradients.
#
# *Accumulating over four micro-batches saves memory. What does it not save, and what would four ranks do better?*
#
# **Next:** [02 · Data](../../notebooks/02_data.ipynb).
