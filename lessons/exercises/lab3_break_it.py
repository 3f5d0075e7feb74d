# %% [markdown]
# # Lab 3 · Break it: slow, large and subtle
#
# The same program again. Two of these cases are right and too slow; one is too large; and one is wrong in a way that only shows
# when ranks are compared. Timelines are the evidence of the day: what does a rank do while it does not compute?
#
# After this lab
#
# 1. you can tell slow computing from slow reading, and both from waiting for somebody else;
# 2. you know when more ranks, or a longer time-out, would not have helped;
# 3. you have seen what each rank keeps for itself although all weights agree.

# %%
import torch

from course_lib.cockpit import Table
from course_lib.faults import FAULTS, REMEDIES
from course_lib.labs import Case

torch.set_num_threads(1)

# %% [markdown]
# Your answer is a dictionary, `{"what": …, "rank": …, "line": …, "fix": …}`. These are the suspects of all three labs, in
# alphabetical order; `"what"` is one of the names on the left.

# %%
Table(["what", "meaning"], [[name, fault.meaning] for name, fault in sorted(FAULTS.items())])

# %% [markdown]
# Most of them are mended in the program: then `"fix"` is the line as it should be, in the place of `"line"`; it may
# be several lines, or none (`""`). It is indented as the old line was, so begin at the margin. Where the program is
# not to blame, `"fix"` is the name of a remedy, and `"line"` says where it happens: the line that a rank did not get
# beyond, or the one that takes it too long. Some of the remedies never help.

# %%
Table(["remedy", "meaning"], [[name, meaning] for name, meaning in REMEDIES.items()])

# %% [markdown]
# `"rank"` is the rank that does or suffers what the others don't (where several suffer, one of them), or `"all"`
# where no rank is special. In a case of your own you would not know either which evidence to look at, so take your
# pick: `case.printed()` has the last lines of each rank (`case.printed(20)` more of them), `case.events("start")` its
# notes of one kind (`start`, `step`, `evaluated`, `valid`, `end`), `case.timeline()` what it did when,
# `case.flight_recorder()` its collectives, `case.stacks()` where it was when it had to be stopped. A – in the Flight
# Recorder means that the rank has left no record of this collective: it has not come there, or was killed before the
# record was saved, ten times a second.

# %% [markdown]
# ## Case a · Slower since Monday
#
# The numbers are right. But since the job runs on other nodes it takes far longer, and the monitoring says that the machines
# are idle for most of the time.

# %%
case_a = Case("3a")
case_a.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more. (The gap near the end is the evaluation, which
# the timeline does not record.)

# %%
case_a.timeline()


# %% solution="a"
def answer_a() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {"what": "straggler", "rank": 1, "line": 66, "fix": "exclude"}
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which part of a step is long, and on which rank?
#
# </details>
# <details><summary>Hint 2</summary>
#
# The others wait for one rank in every step. Does it wait for anybody?
#
# </details>
# <details><summary>Hint 3</summary>
#
# One rank computes for long: its node is slow. No line of the program is to blame; the node is. (The line to name is the
# forward pass, which takes this rank so long.)
#
# </details>

# %% check="a-what" points=2
case_a.check(answer_a)

# %% check="a-fix" points=2
case_a.check_fix(answer_a)

# %% [markdown]
# ## Case b · Slower since the move
#
# The data were moved to a larger file system. The numbers are right, the steps take long, on all ranks alike.

# %%
case_b = Case("3b")
case_b.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_b.timeline()


# %% solution="b"
def answer_b() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {"what": "slow storage", "rank": "all", "line": 31, "fix": "closer"}
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What do the ranks do before they compute?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Every rank loads for long in every step, and none waits for another for long.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Reading is the slow part: in `__getitem__`, where the file is opened. More ranks would all wait for the same disk.
#
# </details>

# %% check="b-what" points=2
case_b.check(answer_b)

# %% check="b-fix" points=2
case_b.check_fix(answer_b)

# %% [markdown]
# ## Case c · It depends on whom you ask
#
# Gradients are no longer averaged by hand: this program uses DDP, and a norm that many nets have. All weights agree, and yet
# the ranks do not make the same forecast for the same image.

# %%
case_c = Case("3c")
case_c.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_c.events("evaluated")

# %%
case_c.events("end")


# %% solution="c"
def answer_c() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {"what": "BatchNorm", "rank": "all", "line": 43, "fix": "nn.GroupNorm(2, 8),"}
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The notes of the evaluation have something that differs from rank to rank and should not.
#
# </details>
# <details><summary>Hint 2</summary>
#
# Buffers are not weights: DDP averages gradients, and nobody averages buffers. Which layer keeps some?
#
# </details>
# <details><summary>Hint 3</summary>
#
# A norm that looks at one image at a time needs no averages over the batch: `nn.GroupNorm(2, 8),` with its comma.
#
# </details>

# %% check="c-what" points=2
case_c.check(answer_c)

# %% check="c-fix" points=2
case_c.check_fix(answer_c)

# %% [markdown]
# What does DDP do about buffers? It sends rank 0's to all ranks before each forward pass of training: the broadcasts in
# `case_c.flight_recorder()`. So ranks differ only by what their last batch has added, but the averages are those of rank 0's
# images alone, and in training every rank normalises by its own share of the batch. A norm that looks at one image at a time
# mends both. (`nn.SyncBatchNorm` normalises by the batch of all ranks together; it needs GPUs.) And `model.module` in the
# evaluation? Under `no_grad` DDP sends buffers before the first forward pass only. With `model(x)` the ranks would agree, on rank
# 0's averages; but a rank without any images would not come to that broadcast, and the others would wait for it.

# %% [markdown]
# ## Case d · A bolder batch
#
# Somebody has made the batch larger, to make better use of the node. Now it does not get through its first step.
#
# (Only Linux can limit what one process takes. On a Mac this case gets through; there take for its last words, on every rank:
# `DefaultCPUAllocator: can't allocate memory: you tried to allocate 12582912 bytes`, in `loss.backward()`.)

# %%
case_d = Case("3d")
case_d.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_d.printed(3)


# %% solution="d"
def answer_d() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {"what": "out of memory", "rank": 0, "line": 17, "fix": "epochs, batch = 2, 4"}
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What was asked for, and by which line of the program?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Activations grow with the batch. Which line says how large it is?
#
# </details>
# <details><summary>Hint 3</summary>
#
# Any batch that fits will do; gradients can be accumulated over several of them (exercise 01). The fix takes the place of
# `"line"`: to change the batch, name the line that sets it.
#
# </details>

# %% check="d-what" points=2
case_d.check(answer_d)

# %% check="d-fix" points=2
case_d.check_fix(answer_d)

# %% [markdown]
# ## Looking back
#
# Which evidence told you most, and which led you astray? In a real job you would have had to decide beforehand what to record:
# the notes cost nothing, the Flight Recorder and the timeline a little. What of it is worth having in every run of yours?
#
# **Next:** [09 · MPI](../../notebooks/09_mpi.ipynb).
