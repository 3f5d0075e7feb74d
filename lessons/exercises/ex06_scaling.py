# %% [markdown]
# # Exercise 06 · Predict, measure, compare
#
# In lesson 06 a model with two numbers for the network predicted how fast many ranks are, two kinds of speed-up said how
# much of them was wasted, and a score was the same on any number of ranks. Here you write all three: what an all-reduce
# costs, what a table of measured seconds means, and the IoU of pixels that lie on different ranks. The checks compare yours
# with the course's own model, and on real processes with what one process gets.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens
# it. A check that fails says on which rank and in which element; `print` works on the ranks, too. A rank that never comes
# back is stopped after five seconds, and you are told where it was. Stuck? Each task has three hints; open them one at a
# time.

# %%
import numpy as np
import torch
import torch.distributed as dist

from course_lib import plots
from course_lib.checks import alone, on_ranks, prepare, same
from course_lib.scaling import Model, Network
from course_lib.scores import Overlap

torch.set_num_threads(1)
prepare()

# %% [markdown]
# ## 1 · What a ring costs
#
# A message costs `alpha` seconds, and `beta` seconds for each byte. Round a ring of n ranks an all-reduce cuts `size` bytes
# into n pieces. In n − 1 rounds everybody passes a piece on, until each piece has been added up somewhere; in n − 1 more
# rounds the sums go round. All ranks send at the same time, so a round lasts as long as one message. Return the seconds. A
# single rank has nobody to send to.


# %% solution="ring"
def ring_seconds(ranks: int, size: float, *, alpha: float, beta: float) -> float:
    """Seconds of an all-reduce of `size` bytes round a ring."""
    ### BEGIN SOLUTION
    return 2 * (ranks - 1) * (alpha + size / ranks * beta)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many rounds are there, and how many bytes has a message? Then it is rounds times the cost of one message.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A message carries one piece, `size / ranks` bytes, and costs `alpha` plus `beta` for each of them. Both halves of the
# all-reduce have n − 1 rounds, not n: nobody needs to get its own piece back.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `2 * (ranks - 1)` rounds, each of `alpha + size / ranks * beta` seconds. For one rank that is 0 without any `if`.
#
# </details>
#
# With 50 µs a message and 1 GB/s, by the course's model. On the left only the number of messages counts, on the right hardly:

# %%
sizes = [2.0**power for power in range(10, 29, 2)]
network = Network(alpha=50e-6, beta=1e-9)
seconds = {f"{n} ranks": (sizes, [1e3 * network.ring(n, size) for size in sizes]) for n in (2, 8, 64)}
plots.curves(seconds, xlabel="bytes", ylabel="milliseconds", logarithmic=True)


# %% check="ring" points=2
def check_ring(alpha: float, beta: float, *, ranks: list[int], size: float) -> None:
    got = alone(lambda: [ring_seconds(n, size, alpha=alpha, beta=beta) for n in ranks])
    mistakes = {
        "whole messages: each carries a piece, 1/n of the bytes": [2 * (n - 1) * (alpha + size * beta) for n in ranks],
        "n rounds instead of n − 1, twice": [2 * n * (alpha + size / n * beta) for n in ranks],
        "half of it: the sums must go round, too": [(n - 1) * (alpha + size / n * beta) for n in ranks],
        "alpha counted once: every message costs it": [alpha + 2 * (n - 1) * size / n * beta for n in ranks],
        "all bytes counted once: a rank sends 2(n − 1) pieces, each 1/n of them": [
            2 * (n - 1) * alpha + size * beta for n in ranks
        ],
        "one message, whatever the number of ranks": [alpha + size * beta] * len(ranks),
        "seconds for all ranks' messages added up: they send at the same time": [
            2 * n * (n - 1) * (alpha + size / n * beta) for n in ranks
        ],
    }
    wanted = [Network(alpha, beta).ring(n, size) for n in ranks]
    what = f"α {alpha:g} s, β {beta:g} s a byte, {size:g} bytes, on {ranks} ranks"
    same(got, wanted, what, mistakes=mistakes)


check_ring(0.001, 1e-6, ranks=[2, 4, 8], size=8000)
check_ring(50e-6, 1e-9, ranks=[1, 2, 1024], size=4e6)
### BEGIN HIDDEN TESTS
check_ring(0.1, 0.0, ranks=[1, 3, 5], size=1000)
check_ring(0.0, 1e-3, ranks=[2, 7], size=700)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · Read a table of seconds
#
# Somebody has measured the seconds of a step: `{1: 0.8, 2: 0.5, 4: 0.4}`. If each rank kept its batch (weak scaling), n
# ranks did n times the work in their step. If the batch was shared (strong scaling), they did the same work. For each
# number of ranks return the speed-up, which compares samples per second with one rank, and the efficiency, the speed-up for
# each rank. `{1: (1.0, 1.0), 2: (1.6, 0.8), …}` is right for one of the two.


# %% solution="speed"
def speed_ups(seconds: dict[int, float], *, weak: bool) -> dict[int, tuple[float, float]]:
    """{ranks: (speed-up, efficiency)} from {ranks: seconds of a step}."""
    ### BEGIN SOLUTION
    found = {n: seconds[1] / taken * (n if weak else 1) for n, taken in seconds.items()}
    return {n: (speed_up, speed_up / n) for n, speed_up in found.items()}
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Samples per second are the samples of a step divided by its seconds. How many samples has a step of n ranks, compared with
# that of one rank?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Shared: as many. So the speed-up is `seconds[1] / seconds[n]`. Kept: n times as many, so it is n times that. The
# efficiency is the speed-up divided by n, in both cases.
#
# </details>
# <details><summary>Hint 3</summary>
#
# For n and `taken` in `seconds.items()`: the speed-up is `seconds[1] / taken`, times n if `weak`; the pair is that, and that
# divided by n.
#
# </details>
#
# The course's model of a machine, with both kinds of scaling. Strong scaling runs out of work:

# %%
machine = Model(fixed=2e-3, per_sample=5e-3, network=Network(50e-6, 1e-9), buckets=(400_000,))
some = [1, 2, 4, 8, 16]
shown = {"ideal": (some, some), "weak, 16 samples a rank": (some, [machine.weak(n, 16) for n in some])}
shown["strong, 16 samples in all"] = some, [machine.strong(n, 16) for n in some]
plots.lines(shown, xlabel="ranks", ylabel="speed-up", dashed=["ideal"])


# %% check="speed" points=2
def check_speed(model: Model, ranks: list[int], batch: int, *, weak: bool) -> None:
    seconds = {n: float(model.step(n, batch if weak else batch / n)) for n in ranks}
    got = alone(lambda: speed_ups(seconds, weak=weak))
    ups = {n: float(model.weak(n, batch) if weak else model.strong(n, batch)) for n in ranks}
    mistakes = {
        "the other kind of scaling: who did how much work?": {
            n: (up / n, up / n**2) if weak else (up * n, up) for n, up in ups.items()
        },
        "upside down: divide the seconds of one rank by those of n": {n: (1 / up, 1 / up / n) for n, up in ups.items()},
        "the efficiency in both places: the speed-up is n times as much": {
            n: (up / n, up / n) for n, up in ups.items()
        },
        "an efficiency that is the speed-up: divide it by the number of ranks": {n: (up, up) for n, up in ups.items()},
        "an efficiency of weak scaling that is divided by n twice": {n: (up, up / n**2) for n, up in ups.items()},
        "right, but efficiencies in per cent": {n: (up, 100 * up / n) for n, up in ups.items()},
    }
    kind = f"weak scaling, {batch} samples a rank" if weak else f"strong scaling, {batch} samples in all"
    same(got, {n: (up, up / n) for n, up in ups.items()}, f"{kind}, on {ranks} ranks", mistakes=mistakes)


check_speed(machine, [1, 2, 4], 8, weak=False)
check_speed(machine, [1, 2, 4], 8, weak=True)
### BEGIN HIDDEN TESTS
check_speed(machine.replace(per_sample=0.1), [1, 3, 64], 32, weak=True)
check_speed(machine.replace(per_sample=0.1), [1, 8, 1024], 32, weak=False)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · One IoU on all ranks
#
# Every rank has masks of its images, (image, y, x) with true for "nucleus": what the net has `found` and what is `real`.
# Return the IoU of all pixels on all ranks, the same on every rank: those that are true in both, divided by those that are
# true in at least one. Ranks have unequally many images, maybe none. If there is no nucleus anywhere, neither found nor
# real, the IoU is 1.


# %% solution="iou"
def iou_of_all(found: torch.Tensor, real: torch.Tensor) -> float:
    """Intersection over union of the pixels of all ranks."""
    ### BEGIN SOLUTION
    sums = torch.stack([(found & real).sum(), (found | real).sum()])
    dist.all_reduce(sums)
    common, union = sums.tolist()
    return common / union if union else 1.0
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# An IoU is a quotient, and quotients can't be added up. Its two numbers can.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `(found & real).sum()` and `(found | real).sum()` are the two, on this rank. Put both in one tensor: one all-reduce is
# enough. A rank without images has two zeros, and takes part.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `sums = torch.stack([(found & real).sum(), (found | real).sum()])`, `dist.all_reduce(sums)`, then `sums[0] / sums[1]`, or
# 1.0 if `sums[1]` is 0. Ask for that zero after the all-reduce, not before.
#
# </details>
#
# Three ranks with different images. The mean of their IoUs is not the IoU of all pixels, as rank 2 has few nuclei:


# %%
def make_masks(images: int, share: float, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Where this share of the pixels is nucleus, and this share of them is seen wrongly."""
    random = np.random.default_rng(images)
    real = random.random((images, 16, 16)) < share
    found = real ^ (random.random(real.shape) < noise)
    return torch.from_numpy(found), torch.from_numpy(real)


def iou(found: torch.Tensor, real: torch.Tensor) -> float:
    """By one process, from the course's own score, which takes a net's output: above zero means nucleus."""
    score, output = Overlap(), found[:, None].float() - 0.5
    return score.result(score.sums(output, real[:, None].float()).tolist())["iou"] if len(found) else 0.0


held = [make_masks(4, 0.6, 0.1), make_masks(3, 0.4, 0.1), make_masks(2, 0.03, 0.1)]
shown = {f"rank {rank}": iou(*masks) for rank, masks in enumerate(held)}
shown["mean of the three"] = np.mean(list(shown.values()))
shown["all pixels"] = iou(*map(torch.cat, zip(*held)))
plots.bars(shown, xlabel="IoU")


# %% check="iou" points=3
def check_iou(*images: int, share: float = 0.5) -> None:
    held = [make_masks(count, share / (rank + 1) ** 2, 0.1 * (share > 0)) for rank, count in enumerate(images)]
    ranks, wanted = len(images), iou(*map(torch.cat, zip(*held)))  # one process with all images
    own = [iou(*masks) for masks in held]
    common = sum(int((found & real).sum()) for found, real in held)
    both = sum(int(found.sum() + real.sum()) for found, real in held)
    by_images = np.average(own, weights=images)
    nothing = "what nothing found would get: but there was nothing to find, which is perfect"
    mistakes = ({} if share else {nothing: [0.0] * ranks}) | {
        "the mean of the ranks' IoUs: add up intersections and unions, divide once": [np.mean(own)] * ranks,
        "the mean of the ranks' IoUs, weighted by their images: pixels count, not images": [by_images] * ranks,
        "the sum of the ranks' IoUs": [sum(own)] * ranks,
        "the IoU of each rank's own images": own,
        "right on rank 0 only: all_reduce tells everybody": [wanted, *own[1:]],
        "a union in which the intersection counts twice": [common / max(1, both)] * ranks,
    }
    got = on_ranks(ranks, lambda rank: iou_of_all(*held[rank]))
    what = f"IoU with {images} images on the ranks" + ", no nucleus anywhere" * (share == 0)
    same(got, [wanted] * ranks, what, ranks=True, mistakes=mistakes)


check_iou(4, 1)
check_iou(2, 0, 3)
check_iou(1, 1, share=0.0)
### BEGIN HIDDEN TESTS
check_iou(1, 2, 3, 4)
check_iou(2, 1, share=0.0)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `Network.ring`, `Model.weak` and `Model.strong` in `course_lib/scaling.py`, and `Overlap` in `course_lib/scores.py` with
# `sum_over_ranks` in `course_lib/metrics.py`.
#
# *A ring of 1,024 ranks needs 2,046 messages one after the other. From which size on does that not matter any more? Your
# first function can tell: where do its two parts cost the same?*
#
# **Next:** [07 · Model parallel](../../notebooks/07_model_parallel.ipynb).
