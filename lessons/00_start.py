# %% [markdown]
# # 00 · Start
#
# Welcome. In this course one small neural network learns to forecast the weather, first on one processor and then on
# many. The network stays the same from the first lesson to the last; what changes is how the work is shared.
#
# After this lesson
#
# 1. you know that your machine can run every lesson, or what to do about it;
# 2. you have run a program, and a cell, on two processes at once, and they have talked to each other;
# 3. you know the six words that the rest of the course is written in.
#
# Press **Shift + Enter** to run a cell and go to the next one. A lesson is meant to be read from top to bottom: the text
# says what a cell is for, the cell does it, the text after it reads the result.

# %% [markdown]
# The next cell holds this lesson's settings. You may change them and run the lesson again.

# %% tags=["parameters"]
world_size = 2  # how many processes to start further down
runs = "../runs"  # where lessons leave their files

# %% [markdown]
# ## Is this machine ready?
#
# The doctor looks at the machine: packages, cores, memory, ports, MPI. You need not know all these words yet. It does not
# only look: for two of its lines it starts two real processes and lets them add up numbers, once through *gloo*
# (PyTorch's way of talking between CPUs) and once through *MPI* (the way that computing centres have used for thirty
# years).

# %%
from course_lib import doctor

ready = doctor.report()
assert ready, "a line above says FAIL, and what to do about it"

# %% [markdown]
# Every line that says `OK` is fine. `WARN` means that the course runs but something may be slow or absent, and `FAIL` that
# a lesson would break; both say what to do. The same check works in a terminal, on any node of a cluster:
#
#     python -m course_lib.doctor

# %% [markdown]
# ## Two processes, one program
#
# Everything in this course rests on one idea: *the same program is started several times*, and each copy is told which
# one it is. Here is such a program. It does four things: find its place, make a number, add it up over all copies, say
# what it knows. `all_reduce` means: everybody gives a number, everybody gets the sum.

# %%
from pathlib import Path

program = Path(runs) / "hello.py"
program.parent.mkdir(exist_ok=True)
program.write_text("""
import os, torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

number = torch.tensor(10 ** rank)          # rank 0 brings 1, rank 1 brings 10, rank 2 brings 100 ...
dist.all_reduce(number)                      # ... and now everybody has the sum
print(f"rank {rank} of {world_size}, process {os.getpid()}: the sum is {number.item()}\\n", end="", flush=True)

dist.destroy_process_group()
""")
print(program.read_text())

# %% [markdown]
# *Before you run it: what will each of the two processes print as the sum?*
#
# <details><summary>Answer</summary>
# Both print 11. An all-reduce gives every rank the same result; nobody is the boss.
# </details>
#
# `torchrun` is PyTorch's launcher. It starts the copies and tells each one its place through environment variables.

# %%
import os
import re
import subprocess
import sys

launcher = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    f"--nproc-per-node={world_size}",
    str(program),
]
loopback = "lo0" if sys.platform == "darwin" else "lo"  # the ranks talk within this machine
settings = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
result = subprocess.run(launcher, env=settings, capture_output=True, text=True, check=False)
print(result.stdout, result.stderr if result.returncode else "")

# %% [markdown]
# Two lines from two processes, with two different process numbers, in whatever order they came. Let us not only look at
# it but demand it: every rank must know the same sum.

# %%
sums = [int(number) for number in re.findall(r"the sum is (\d+)", result.stdout)]
expected = sum(10**rank for rank in range(world_size))
assert sums == [expected] * world_size, f"expected {world_size} times {expected}, got {sums}"
print(f"{world_size} ranks agree on {expected}")

# %% [markdown]
# ## A cell on all ranks
#
# Writing a file and starting a launcher is how real runs work. For looking and trying there is a shorter way: ranks that
# stay and wait for cells. They are started once, in a few seconds,

# %%
from course_lib import ranks

team = ranks.start(world_size)

# %% [markdown]
# and from then on a cell that begins with `%%px` runs on all of them, and not in this notebook. What each prints comes with
# its rank in front. Change the cell, run it again: the ranks remember their variables.

# %%
# %%px
import torch
import torch.distributed as dist

from course_lib.config import Config
from course_lib.world import start

world = start(Config(launcher="mpi"))
number = torch.tensor(10**world.rank)
dist.all_reduce(number)
print(f"rank {world.rank} of {world.world_size}: the sum is {number.item()}")

# %% [markdown]
# The notebook can look at a variable of all ranks at once. When it is done it lets them go; they would also end with it.

# %%
answers = [number.item() for number in team["number"]]
assert answers == sums
team.stop()
print(answers)

# %% [markdown]
# ## Six words
#
# | word | meaning |
# |---|---|
# | **rank** | one copy of the program, and its number: 0, 1, 2, … |
# | **world size** | how many ranks there are |
# | **local rank** | a rank's number on its own machine; it picks the GPU |
# | **node** | a machine; a node may run several ranks |
# | **collective** | an operation that all ranks do together, such as all-reduce |
# | **launcher** | who starts the ranks: torchrun, mpirun, or Slurm's srun |

# %% [markdown]
# ## The way ahead
#
# Lessons 01 and 02 make one process as good as it can be: there is no point in sharing work that is done badly. From 03
# on the ranks share it: the data (03, 04), a cluster (05, 06), the model (07, 08), then the same with MPI, Horovod and
# Lightning (09 to 11), and two case studies (12, 13). From 03 on every lesson proves that its result equals that of one
# process. Everything runs on CPU ranks; a GPU makes it faster, and the lessons stay the same.
#
# ## Numbers of this run
#
# Every lesson ends with a small table. CI compares it with what it was, so that a lesson cannot quietly go wrong.

# %%
from course_lib.lesson import numbers

numbers(ranks=len(sums), sum_over_ranks=sums[0], sum_in_cells=answers[0])

# %% [markdown]
# ## What you have seen
#
# - The doctor says whether a machine can run the course, and what to do if not.
# - The same program runs on every rank; only its rank number differs.
# - A collective such as all-reduce gives every rank the same answer.
# - A launcher starts the ranks and tells them their place through the environment.
# - `ranks.start` keeps ranks waiting for this notebook; `%%px` cells run on all of them.
#
# **Exercise:** [ex00](../exercises/ex00_start/ex00_start.ipynb), who does what.
#
# **Next:** [01 · Baseline](01_baseline.ipynb), one device, and where its time and memory go.
