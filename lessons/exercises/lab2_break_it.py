# %% [markdown]
# # Lab 2 · Break it: the dead and the stuck
#
# The same program as in lab 1, and four other things that go wrong. These are the ones that ring at night: a job that stands
# still, or ends with a page of tracebacks in which every rank blames another. The rank that complains is seldom the one to
# blame. Lesson 05 showed the tools; here nobody tells you which one to take.
#
# After this lab
#
# 1. you can tell the rank that failed from those that only lost it;
# 2. you can read a hang from stacks and from the Flight Recorder;
# 3. you know which breakdowns are mended in the program, and which are not.

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
# ## Case a · Two witnesses
#
# Two of three ranks end with a traceback that names the network. The administrators say that the network is fine.

# %%
case_a = Case("2a")
case_a.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_a.printed(12)

# %%
case_a.flight_recorder()


# %% solution="a"
def answer_a() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {"what": "killed rank", "rank": 2, "line": 42, "fix": "restart"}
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two ranks have lost a connection. To whom?
#
# </details>
# <details><summary>Hint 2</summary>
#
# One rank has no last words at all: what ends a process so that it can't even say so? Look at the line that the others were in.
#
# </details>
# <details><summary>Hint 3</summary>
#
# A process that is killed from outside, by the kernel's memory guard or an administrator, is nobody's bug in here. What brings
# a run back is a checkpoint and a launcher that starts it again.
#
# </details>

# %% check="a-what" points=2
case_a.check(answer_a)

# %% check="a-fix" points=2
case_a.check_fix(answer_a)

# %% [markdown]
# ## Case b · Standing still
#
# No error, no output, no load on the machine. After some seconds somebody stops it.

# %%
case_b = Case("2b")
case_b.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_b.stacks()

# %%
case_b.flight_recorder()


# %% solution="b"
def answer_b() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {"what": "mismatched collective", "rank": 0, "line": 71, "fix": ""}
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Where is each rank? They can't all be waiting for the same thing.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In the Flight Recorder, find the first number at which the ranks do not do the same.
#
# </details>
# <details><summary>Hint 3</summary>
#
# A collective inside `if rank == …` is a call that the others never make. It is not needed: leave the line out.
#
# </details>

# %% check="b-what" points=2
case_b.check(answer_b)

# %% check="b-fix" points=2
case_b.check_fix(answer_b)

# %% [markdown]
# ## Case c · Always at the same place
#
# It breaks in the first epoch, always after the same number of steps, and each time another rank shouts loudest.

# %%
case_c = Case("2c")
case_c.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_c.events("step")

# %%
case_c.flight_recorder()

# %%
case_c.printed(3)


# %% solution="c"
def answer_c() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {
        "what": "uneven shards",
        "rank": 0,
        "line": 56,
        "fix": "sampler = list(range(rank, len(train) // ranks * ranks, ranks))",
    }
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# How many steps has each rank noted, and which of them has begun to validate?
#
# </details>
# <details><summary>Hint 2</summary>
#
# 37 images, 3 ranks, batches of 4: how many batches has each rank?
#
# </details>
# <details><summary>Hint 3</summary>
#
# The rank with one image more has one batch more, for which nobody joins it. Cut the range so that all ranks have equally many.
#
# </details>

# %% check="c-what" points=2
case_c.check(answer_c)

# %% check="c-fix" points=2
case_c.check_fix(answer_c)

# %% [markdown]
# ## Case d · Only on the cluster
#
# On a laptop this version has always worked. On the cluster, with its busy file system, it ends at the first checkpoint.

# %%
case_d = Case("2d")
case_d.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_d.printed(3)


# %% solution="d"
def answer_d() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {
        "what": "forgotten barrier on save",
        "rank": 1,
        "line": 85,
        "fix": 'dist.barrier()\nmodel.load_state_dict(torch.load(run / f"epoch{epoch}.pt"))',
    }
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which ranks miss which file, and who writes it?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Nothing makes a rank wait until rank 0 has written. On a fast disk it wins the race each time.
#
# </details>
# <details><summary>Hint 3</summary>
#
# A barrier between writing and reading: all wait until rank 0 is there, too. Put it in front of the line that reads.
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
# **Next:** [06 · Scaling](../../notebooks/06_scaling.ipynb).
