# %% [markdown]
# # Lab 1 · Break it: the quiet ones
#
# A net learns to smooth images, on three ranks, in about eighty lines. It is a good program. In each case of this lab something
# has been done to it, or around it, and it is run on real ranks in front of you. You get what you would have on a cluster:
# what the ranks printed, the notes that they made, a timeline, the Flight Recorder, the stacks of those who never came back.
# You say **what** is wrong, on **which rank**, in **which line**, and how to **fix** it: your line is run on
# real ranks, too. Where the program is not to blame, as in some cases of the next labs, you name a remedy.
#
# After this lab
#
# 1. you can tell a run that is wrong from one that is right when neither of them complains;
# 2. you know which question each kind of evidence answers;
# 3. you have mended four programs and seen that their numbers are those of the good one, to five digits.

# %%
import torch

from course_lib.cockpit import Table
from course_lib.faults import FAULTS, REMEDIES
from course_lib.labs import Case, good_events

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
# beyond, or the one that takes it too long. Some of the remedies never help. Only one thing is wrong in each case: a
# number that you miss stands in the program of another one.

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
# ## Case a · The loss that came out worse
#
# A colleague has tidied the program up. It runs, all ranks agree at the end, the loss falls. But it is not as low as it was
# last week, with the same data and the same number of steps.

# %%
case_a = Case("1a")
case_a.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_a.events("start")

# %%
case_a.events("valid")

# %% [markdown]
# And what the good program noted there, last week:

# %%
good_events("valid")


# %% solution="a"
def answer_a() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {"what": "rank-dependent seed", "rank": "all", "line": 47, "fix": "torch.manual_seed(0)"}
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# What do all ranks have to have in common before the first step?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Gradients are averaged, weights are not: weights that are different at the start stay different. Compare the notes
# of the start.
#
# </details>
# <details><summary>Hint 3</summary>
#
# The seed decides about the weights of a new net. The line that sets it must not know the rank. Last week it was 0
# everywhere, as in the other cases.
#
# </details>

# %% check="a-what" points=2
case_a.check(answer_a)

# %% check="a-fix" points=2
case_a.check_fix(answer_a)

# %% [markdown]
# ## Case b · Twice the same
#
# Here the loss looks as it should. Yet somebody who looked at the samples of each step is not happy with the second epoch.

# %%
case_b = Case("1b")
case_b.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_b.events("step")


# %% solution="b"
def answer_b() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {"what": "missing set_epoch", "rank": "all", "line": 61, "fix": "model.train()\nsampler.set_epoch(epoch)"}
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Compare the samples of epoch 0 with those of epoch 1, for one rank.
#
# </details>
# <details><summary>Hint 2</summary>
#
# The order is shuffled by a seed and by the number of the epoch. Who tells the sampler that number?
#
# </details>
# <details><summary>Hint 3</summary>
#
# `sampler.set_epoch(epoch)` belongs into the loop over epochs, before the loader is made. Name the line after which it should
# stand, and write both lines.
#
# </details>

# %% check="b-what" points=2
case_b.check(answer_b)

# %% check="b-fix" points=2
case_b.check_fix(answer_b)

# %% [markdown]
# ## Case c · A number in the log
#
# The program is said to report a validation loss that is a little wrong. The weights are right, to the last bit.

# %%
case_c = Case("1c")
case_c.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_c.events("evaluated")

# %%
case_c.events("valid")


# %% solution="c"
def answer_c() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {
        "what": "wrong loss averaging",
        "rank": "all",
        "line": 78,
        "fix": "total = torch.tensor([sum(errors), len(errors)])",
    }
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Each rank notes the mean error of its images, and how many they are. What is the mean over all images?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Ten images on three ranks are four, three and three. A mean of three means counts an image of the last ranks more than one
# of the first.
#
# </details>
# <details><summary>Hint 3</summary>
#
# Add up sums and counts over all ranks, and divide at the end.
#
# </details>

# %% check="c-what" points=2
case_c.check(answer_c)

# %% check="c-fix" points=2
case_c.check_fix(answer_c)

# %% [markdown]
# ## Case d · It ran all week
#
# Nothing was changed. This morning the job ends after a second, on the same node as always, and only there.

# %%
case_d = Case("1d")
case_d.program()

# %% [markdown]
# The evidence that most would look at first; add cells of your own for more.

# %%
case_d.printed(25)


# %% solution="d"
def answer_d() -> dict:
    """What is wrong, on which rank, in which line, and what to write there instead."""
    ### BEGIN SOLUTION
    return {"what": "fixed port taken", "rank": 0, "line": 46, "fix": 'dist.init_process_group("gloo")'}
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Which rank has something to say, and at which line?
#
# </details>
# <details><summary>Hint 2</summary>
#
# Two jobs on one node can't listen on the same port. Where does this program's come from? Another number would do
# until somebody takes that one, too.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `init_process_group` asks the launcher's variables for address, port, rank and number of ranks when it is not told: as in the
# other cases. The launcher chooses a port that is free.
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
# **Next:** [05 · Launch](../../notebooks/05_launch.ipynb).
