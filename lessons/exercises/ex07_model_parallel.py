# %% [markdown]
# # Exercise 07 · Stages and strips
#
# In lesson 07 one model was shared by several ranks: across, in stages, and along the image, in strips. Here you write the
# order in which a stage works under 1F1B, a whole step of a pipeline with its messages, and the exchange of rows between
# strips. The first check carries your orders out on paper; the others compare with one process that has the whole model and the
# whole image.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens
# it. A check that fails says on which rank and in which element; `print` works on the ranks, too. Ranks that wait for each
# other are stopped after five seconds, and you are told where they were. Stuck? Each task has three hints; open them one at a
# time.

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib import plots
from course_lib.checks import alone, on_ranks, prepare, require, same
from course_lib.parallel.schedules import plan

torch.set_num_threads(1)
prepare("torch.fx.experimental.symbolic_shapes")  # backward(gradient) imports it: once, not on every rank

# %% [markdown]
# ## 1 · One forward, one backward
#
# Between its forward and its backward a micro-batch's activations must be kept. Under 1F1B stage s keeps at most `stages - s`
# of them, so the last stage keeps one. Within this limit a stage goes forward as early as it can; when the limit is reached,
# it takes the oldest one backward. Return what a stage does, in its order: a list of `("forward", number)` and `("backward",
# number)`, with numbers from 0.


# %% solution="order"
def order(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """What this stage does, one after the other; the first stage is number 0."""
    ### BEGIN SOLUTION
    ahead = min(stages - stage - 1, micro_batches)
    work = [("forward", number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        work += [("forward", number), ("backward", number - ahead)]
    return work + [("backward", number) for number in range(micro_batches - ahead, micro_batches)]
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# There are three parts: the pipeline fills, then forward and backward take turns, then it drains. What does the last stage
# do, which has nobody behind it?
#
# </details>
# <details><summary>Hint 2</summary>
#
# It takes turns from the beginning. The one before it goes forward once more at first, so that the last has something to do,
# and ends with one backward more. And so on; but there are only `micro_batches` of them.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `ahead = min(stages - stage - 1, micro_batches)` forwards. Then for each number from `ahead` on: its forward, and the
# backward of `number - ahead`. Then the last `ahead` backwards.
#
# </details>
#
# Read it off the picture: three stages, five micro-batches, light boxes are forward, dark ones backward. (It counts from 1.)

# %%
plots.schedules({"1F1B": plan("1f1b", 5, [1.0] * 3)})


# %% check="order" points=3
def carry_out(orders: list) -> tuple[float, list[str]]:
    """When all is done, if a forward takes 1 and a backward 2; and who waits for what for ever."""
    ends, clocks, todo = {}, [0.0] * len(orders), [list(work) for work in orders]

    def needed(kind, number, stage):
        """What must be done first: the neighbour's part, and forward before backward."""
        neighbour = (kind, number, stage - 1 if kind == "forward" else stage + 1)
        own = [("forward", number, stage)] if kind == "backward" else []
        return own + [neighbour] * (0 <= neighbour[2] < len(orders))

    while ready := [s for s, work in enumerate(todo) if work and all(one in ends for one in needed(*work[0], s))]:
        for stage in ready:
            kind, number = todo[stage].pop(0)
            clocks[stage] = max([clocks[stage], *(ends[one] for one in needed(kind, number, stage))])
            clocks[stage] += 1 if kind == "forward" else 2
            ends[kind, number, stage] = clocks[stage]
    waits = []
    for stage, work in enumerate(todo):
        if work:
            kind, number, other = next(one for one in needed(*work[0], stage) if one not in ends)
            waits.append(f"stage {stage} at {' '.join(map(str, work[0]))} for the {kind} {number} of stage {other}")
    return max(clocks), waits


def odd(work, micro_batches: int) -> str:
    """What is wrong with a stage's list, whatever the others do; "" if nothing is."""
    all_of_it = [(kind, number) for kind in ("forward", "backward") for number in range(micro_batches)]
    if not isinstance(work, list):
        return f"has {work!r}, which is no list"
    strange = [one for one in work if one not in all_of_it]
    missing = [one for one in all_of_it if one not in work]
    if strange:
        return f"has {strange[0]!r}, which is none of {all_of_it[0]} … {all_of_it[-1]}"
    return f"leaves out {missing[:3]}" if missing else "does something twice" * (len(work) > len(all_of_it))


def check_order(stages: int, micro_batches: int) -> None:
    what = f"{stages} stages, {micro_batches} micro-batches"
    orders = alone(lambda: [order(stage, stages, micro_batches) for stage in range(stages)])
    found = [
        f"stage {stage} {odd(work, micro_batches)}" for stage, work in enumerate(orders) if odd(work, micro_batches)
    ]
    require(not found, f"every stage does everything once, {what}", "; ".join(found[:1]))
    end, waits = carry_out(orders)
    require(not waits, f"nobody waits for ever, {what}", "a deadlock: " + "; ".join(waits))
    for stage, work in enumerate(orders):
        kept = max(sum(1 if kind == "forward" else -1 for kind, _ in work[: n + 1]) for n in range(len(work)))
        if kept > stages - stage:
            found.append(f"stage {stage} keeps {kept} micro-batches at the same time, and may keep {stages - stage}")
            found[-1] += ": this is GPipe, all forward first" * (kept == micro_batches)
    require(not found, f"no stage keeps too many, {what}", "; ".join(found[:1]))
    for stage, work in enumerate(orders):
        numbers = [number for kind, number in work if kind == "backward"]
        found += [f"stage {stage} takes {a} backward before {b}" for a, b in zip(numbers, numbers[1:]) if a > b]
    require(not found, f"the oldest goes backward first, {what}", "; ".join(found[:1]))
    best = max(slot.end for stage in plan("1f1b", micro_batches, [1.0] * stages) for slot in stage)
    why = f"the end comes at {end:g}, and {best:g} is possible: some stage could go forward earlier"
    require(end == best, f"no more bubble than there must be, {what}", why)


check_order(3, 5)
### BEGIN HIDDEN TESTS
check_order(4, 8)
check_order(4, 2)
check_order(2, 1)
check_order(1, 3)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · A step of a pipeline
#
# Every rank has one stage. `x` and `y` are known to all; the first stage reads `x`, the last one compares with `y` by
# `F.mse_loss`. Cut both into `micro_batches` with `chunk`. First all go forward: receive what the stage before has made,
# compute, send it on. Then all go backward, with gradients travelling the other way. Afterwards each stage's gradients are
# those of the mean loss of the whole batch. What leaves a stage has the shape and the dtype of what entered it.


# %% solution="step"
def step(stage: nn.Module, x: torch.Tensor, y: torch.Tensor, micro_batches: int) -> None:
    """Forward and backward of a batch; this rank has the stage of its number."""
    ### BEGIN SOLUTION
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept = []
    for inputs, targets in zip(x.chunk(micro_batches), y.chunk(micro_batches)):
        entered = inputs
        if rank > 0:
            entered = torch.empty_like(inputs)
            dist.recv(entered, rank - 1)
            entered.requires_grad_()
        outputs = stage(entered)
        if rank < last:
            dist.send(outputs.detach(), rank + 1)
        else:
            outputs = F.mse_loss(outputs, targets) / micro_batches
        kept.append((entered, outputs))
    for entered, outputs in reversed(kept):
        gradient = None
        if rank < last:
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, rank + 1)
        outputs.backward(gradient)
        if rank > 0:
            dist.send(entered.grad, rank - 1)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The first rank receives nothing in forward and sends nothing in backward; for the last rank it is the other way round. Keep
# what entered and what left, for each micro-batch: backward needs both.
#
# </details>
# <details><summary>Hint 2</summary>
#
# A tensor that has arrived knows nothing of its past. Call `requires_grad_()` on it before the stage computes with it, and
# after backward its `grad` is what the rank before waits for. `outputs.backward(gradient)` goes on from a gradient that has
# arrived. The mean over the batch is the sum of the micro-batches' means, each divided by their number.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Forward: `entered = torch.empty_like(inputs)`, `dist.recv(entered, rank - 1)`, `entered.requires_grad_()`; then `outputs =
# stage(entered)` and `dist.send(outputs.detach(), rank + 1)`, or on the last rank `outputs = F.mse_loss(outputs, targets) /
# micro_batches`. Backward, over what was kept: `dist.recv(gradient, rank + 1)`, `outputs.backward(gradient)`,
# `dist.send(entered.grad, rank - 1)`; the last rank calls `outputs.backward()` without one.
#
# </details>
#
# Three ranks and four micro-batches should do this. Whether backward begins with the first or with the last is up to you, if
# it is the same on all ranks; here it is the last.

# %%
plots.schedules({"all forward, then all backward": plan("gpipe", 4, [1.0] * 3)})


# %% check="step" points=4
def make_stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 5), nn.Tanh()).double() for _ in range(count)]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def check_step(ranks: int, samples: int, micro_batches: int) -> None:
    x, y = torch.randn(2, samples, 5, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    what = f"{ranks} stages, {samples} samples in {micro_batches} micro-batches"

    def run(rank):
        stage, done = make_stages(ranks)[rank], []

        def note(_, __, output):
            done.append(f"forward of {len(output)}")
            output.register_hook(lambda gradient: done.append(f"backward of {len(gradient)}"))

        stage.register_forward_hook(note)
        step(stage, x, y, micro_batches)
        return gradients(stage), done

    got = on_ranks(ranks, run)
    whole = nn.Sequential(*make_stages(ranks))  # one process with the whole model and the whole batch
    F.mse_loss(whole(x), y).backward()
    wanted = [gradients(stage) for stage in whole]
    none = [[torch.zeros_like(g) for g in stage] for stage in wanted]
    mistakes = {
        "no gradient at all: has anything gone backward?": none,
        "a gradient on the last stage only: the others wait for theirs to be sent": [*none[:-1], wanted[-1]],
        "the sum over the micro-batches: divide each loss by their number": [
            [micro_batches * g for g in stage] for stage in wanted
        ],
    }
    if micro_batches == 1:
        del mistakes["the sum over the micro-batches: divide each loss by their number"]
    same([grads for grads, _ in got], wanted, f"gradients, {what}", ranks=True, mistakes=mistakes)
    share, times = samples // micro_batches, micro_batches
    wanted = [f"forward of {share}"] * times + [f"backward of {share}"] * times
    mistakes = {
        "one micro-batch after the other: all other stages stand still": [wanted[::times] * times] * ranks,
        "the whole batch at once: a pipeline needs micro-batches": [[f"forward of {samples}", f"backward of {samples}"]]
        * ranks,
    }
    same([done for _, done in got], [wanted] * ranks, f"what each stage does, {what}", ranks=True, mistakes=mistakes)


check_step(2, 8, 4)
### BEGIN HIDDEN TESTS
check_step(3, 6, 2)
check_step(4, 9, 3)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · Halos
#
# An image lies on the ranks in strips, rank 0 on top. A 3 × 3 convolution reads one row beyond each edge of a strip. Return
# the strip with one row more above and below: the last row of the rank above, and the first row of the rank below. The
# image's own edge gets zeros, as a padded convolution has them. Every rank sends and receives; mind who does what first.


# %% solution="halo"
def with_halo(strip: torch.Tensor) -> torch.Tensor:
    """(y, x) → (y + 2, x): a row of each neighbour, zeros where there is none."""
    ### BEGIN SOLUTION
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    above, below = torch.zeros_like(strip[0]), torch.zeros_like(strip[0])
    under_way = []
    if rank > 0:
        under_way += [dist.isend(strip[0].contiguous(), rank - 1), dist.irecv(above, rank - 1)]
    if rank < last:
        under_way += [dist.isend(strip[-1].contiguous(), rank + 1), dist.irecv(below, rank + 1)]
    for work in under_way:
        work.wait()
    return torch.cat([above[None], strip, below[None]])
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# If all ranks begin with `dist.recv`, nobody sends; if all begin with `dist.send`, nobody receives. Which calls return at
# once?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `dist.isend(tensor, to)` and `dist.irecv(tensor, source)` start a message and return something to `wait()` for. Start all of
# them, then wait for all. The first rank has nobody above, the last one nobody below.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `above` and `below` begin as `torch.zeros_like(strip[0])`. To `rank - 1`, if there is one: isend `strip[0]`, irecv `above`.
# To `rank + 1`: isend `strip[-1]`, irecv `below`. Wait for all; then `torch.cat([above[None], strip, below[None]])`.
#
# </details>
#
# Blurred by a convolution, on three strips: how far each place is from the image that was blurred as a whole, without halos
# and with them. The second picture should be empty.

# %%
y, x = torch.meshgrid(torch.linspace(0, 6, 18), torch.linspace(0, 9, 30), indexing="ij")
image, blur = torch.sin(y) + torch.cos(x * y / 5), torch.full((1, 1, 3, 3), 1 / 9)
right, framed = F.conv2d(image[None], blur[0][None], padding=1)[0], F.pad(image, (0, 0, 1, 1))
without = torch.cat([F.conv2d(strip[None], blur[0][None], padding=1)[0] for strip in image.chunk(3)])
halos = torch.cat([F.conv2d(framed[a : a + 8][None], blur[0][None], padding=(0, 1))[0] for a in (0, 6, 12)])
plots.fields(
    {"error without halos": (without - right).abs().numpy(), "error with halos": (halos - right).abs().numpy()}
)


# %% check="halo" points=3
def check_halo(ranks: int, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    image, kernel = (torch.randn(*shape, generator=generator) for shape in ((rows, columns), (1, 1, 3, 3)))
    strips, zeros = image.tensor_split(ranks), torch.zeros(1, columns)
    edges = [sum(len(strip) for strip in strips[:rank]) for rank in range(ranks + 1)]

    def frame(rows_above, rows_below) -> list[torch.Tensor]:
        """All strips with these rows around them, zeros at the image's edge."""
        above, below = [zeros, *rows_above], [*rows_below, zeros]
        return [torch.cat([a, strip, b]) for a, strip, b in zip(above, strips, below)]

    firsts, lasts = [strip[:1] for strip in strips], [strip[-1:] for strip in strips]
    wanted = frame(lasts[:-1], firsts[1:])
    around = torch.cat([image[-1:], image, image[:1]])
    mistakes = {
        "zeros on all sides: nothing came from the neighbours, or nobody waited for it": [
            F.pad(strip, (0, 0, 1, 1)) for strip in strips
        ],
        "zeros below each strip: nothing came from the rank below": frame(lasts[:-1], [zeros] * (ranks - 1)),
        "zeros above each strip: nothing came from the rank above": frame([zeros] * (ranks - 1), firsts[1:]),
        "a round planet: the first and the last rank are no neighbours here": [
            around[a : b + 2] for a, b in zip(edges, edges[1:])
        ],
        "the neighbours' far rows: from above comes its last row, from below its first": frame(firsts[:-1], lasts[1:]),
        "the rows of above and below exchanged": [torch.cat([w[-1:], w[1:-1], w[:1]]) for w in wanted],
        "the strip's own edge rows again": [torch.cat([s[:1], s, s[-1:]]) for s in strips],
    }
    what = f"{rows} rows on {ranks} ranks"
    got = on_ranks(ranks, lambda rank: with_halo(strips[rank]))
    same(got, wanted, f"strips with halos, {what}", ranks=True, mistakes=mistakes)
    convolved = torch.cat([F.conv2d(framed[None, None], kernel, padding=(0, 1))[0, 0] for framed in got])
    same(convolved, F.conv2d(image[None, None], kernel, padding=1)[0, 0], f"convolved strips are the image, {what}")


check_halo(2, 6, 5)
### BEGIN HIDDEN TESTS
check_halo(3, 8, 4)
check_halo(4, 4, 1)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `course_lib/parallel/schedules.py` has both orders on paper, `course_lib/parallel/pipeline.py` the step, with messages that
# travel while the rank computes, and `course_lib/parallel/spatial.py` the halos, with their gradients. *Your step keeps all
# micro-batches. Could it work in the order of task 1, with `send` and `recv` that wait for each other? Try it on paper with
# two stages.*
#
# **Next:** [08 · Sharding](../../notebooks/08_sharding.ipynb).
