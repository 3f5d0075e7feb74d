# %% [markdown]
# # Exercise 05 · What survives a death
#
# In lesson 05 a rank was killed, and nobody could tell from the weights. Here you write the three pieces that this took: a
# checkpoint that is never half written, the samples that are left after a restart, and the translation of Slurm's words for a
# rank's place. Each is a function of a few lines. The first check really kills the process that is saving.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens
# it. A check that fails says what it found and where. A call that never comes back is stopped after five seconds. Stuck? Each
# task has three hints; open them one at a time.

# %%
import os
import resource
import signal
import tempfile
from pathlib import Path

import torch

from course_lib import plots
from course_lib.checks import TrialError, alone, difference, on_ranks, prepare, require, same

torch.set_num_threads(1)
prepare()

# %% [markdown]
# ## 1 · Save all or nothing
#
# Write `state` to `path` so that whoever looks there finds the old checkpoint or the new one, and never half of one, whenever
# the process is killed. Write beside it, in the same folder, under a name that does not end in `.pt`, for a restart may look
# for `*.pt`. Only a file that is complete, and on the disk, is renamed. That it is on the disk you have to ask for: a file's
# last bytes wait in Python's buffer, then in the system's.


# %% solution="save"
def save(state: dict, path: Path) -> None:
    """Write a checkpoint that torch.load can read; a kill at any moment leaves the old one whole."""
    ### BEGIN SOLUTION
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `torch.save(state, path)` empties the old file before it writes the first byte of the new one. Which single call of the
# operating system exchanges a file for another all at once?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `os.replace(part, path)`. Before that: `torch.save` also takes an open file; `file.flush()` empties Python's buffer, and
# `os.fsync(file.fileno())` waits until the system has written its own. In this order.
#
# </details>
# <details><summary>Hint 3</summary>
#
# The name beside it: `path.with_name(path.name + ".part")`. Open it with `"wb"` in a `with`; inside: `torch.save(state,
# file)`, flush, fsync. After the `with`: `os.replace`. What an earlier death has left under that name may be overwritten.
#
# </details>
#
# The old checkpoint is of step 100, the new one of step 200. Where does a restart go on, if the kill comes after so much of
# the new file? At 0 it has to begin anew.

# %%
written = [0, 20, 40, 60, 80, 99, 100]  # per cent
in_place = [0 if share < 100 else 200 for share in written]
beside = [100 if share < 100 else 200 for share in written]
plots.lines(
    {"written in place": (written, in_place), "beside, then renamed": (written, beside)},
    xlabel="written when the kill comes (%)",
    ylabel="step of the restart",
)


# %% check="save" points=2
def killed(call, size: int) -> None:
    """Make a call in a process that the system kills as soon as it writes more than so many bytes to a file."""

    def run():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # "file too large" is deadly, as SIGKILL is
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        call()

    try:
        alone(run)
    except TrialError as error:
        if "killed by signal" not in str(error):
            raise


def restart(path: Path, wanted: dict, when: str) -> None:
    """What does a program find that is started now?"""
    try:
        wrong = difference(torch.load(path, weights_only=True), wanted)
    except FileNotFoundError:
        wrong = "there is no file of that name: not written, or moved away too early"
    except Exception:
        size = path.stat().st_size
        wrong = f"torch.load can't read these {size} bytes: a file that is half written, or not by torch.save"
    require(not wrong, f"the checkpoint {when}", wrong)


def check_save(numbers: int, part: float) -> None:
    old, new = ({"step": step, "weights": torch.full((numbers,), float(step))} for step in (1, 2))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "checkpoint.pt")
        alone(lambda: save(old, path))
        restart(path, old, "after the first save")
        killed(lambda: save(new, path), int(part * 4 * numbers))
        restart(path, old, f"after a kill at {part:.0%} of the next one")
        others = [file.name for file in Path(name).glob("*.pt") if file != path]
        require(not others, "no half of a file is called .pt", f"a restart that looks for *.pt finds {others}")
        alone(lambda: save(new, path))
        restart(path, new, "after a save that nobody disturbed")


check_save(10_000, 0.5)
### BEGIN HIDDEN TESTS
check_save(50_000, 0.01)
check_save(3_000, 0.99)
### END HIDDEN TESTS

# %% [markdown]
# A kill ends a process, but the system goes on and writes what it has in its buffers. A power cut does not wait for that. The
# second check notes what you ask of the system, in which order, and how much of the file it had seen by then.


# %% check="save-on-disk" points=1
def noting(path: Path, numbers: int) -> list[tuple]:
    """Save over an old file. Of each call that syncs or renames: the file, its new name, its status; is the old one there?"""
    calls = []
    path.write_bytes(b"old")
    for name in {"fsync", "fdatasync", "replace", "rename"} & set(dir(os)):

        def noted(*given, call=getattr(os, name), **named):
            file, new = [*given, *named.values(), None][:2]
            status = os.stat(file.fileno() if hasattr(file, "fileno") else file)
            calls.append((str(file), str(new), status.st_ino, status.st_size, path.exists()))
            return call(*given, **named)

        setattr(os, name, noted)
    save({"weights": torch.ones(numbers)}, path)
    return calls


def check_on_disk(numbers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        calls = alone(lambda: noting(path, numbers))
    renames = [number for number, call in enumerate(calls) if call[1] == str(path)]
    require(
        bool(renames),
        "a file is renamed",
        "nothing was renamed to the checkpoint's name: it was written under that name, or not at all",
    )
    source, _, inode, size, old_is_there = calls[renames[0]]
    why = "it comes from another folder; between file systems a rename is a copy, and that takes time: write beside"
    require(Path(source).parent == Path(folder), "it lay in the same folder", why)
    why = "it was removed, or moved away, and a kill just then leaves none: os.replace takes its place in one call"
    require(old_is_there, "the old one is there until the rename", why)
    synced = [call[3] for call in calls[: renames[0]] if call[2] == inode]
    why = "a power cut may keep the new name and lose the content: os.fsync first"
    require(bool(synced), "fsync before the rename", why)
    why = f"at fsync the system had {synced[-1]} of {size} bytes, the rest was in Python's buffer: flush first"
    require(synced[-1] == size, "the whole file is on the disk before it is renamed", why)


check_on_disk(100)
### BEGIN HIDDEN TESTS
check_on_disk(100_001)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · Go on where it stopped
#
# A checkpoint says how many samples of this epoch are done: `seen`, counted over all ranks. The epoch's order is known to all
# ranks. In each step the next `ranks * batch` samples of it are used up: rank 0 has the first `batch` of them, rank 1 the
# next, and so on. Return this rank's batches from here to the epoch's end; an incomplete last step is left out. The job may
# have come back with another number of ranks.


# %% solution="remaining"
def remaining(order: list[int], seen: int, *, batch: int, rank: int, ranks: int) -> list[list[int]]:
    """The batches that this rank has still to do, when `seen` samples of the epoch are done."""
    ### BEGIN SOLUTION
    together = batch * ranks
    steps = (len(order) - seen) // together
    firsts = [seen + step * together + rank * batch for step in range(steps)]
    return [order[first : first + batch] for first in firsts]
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Forget the ranks for a moment. Which samples are left, and how many whole steps can be made of them by all ranks together?
#
# </details>
# <details><summary>Hint 2</summary>
#
# `order[seen:]` is left. A step takes `batch * ranks` of them. Within a step, this rank's part begins `rank * batch` after
# the step's beginning.
#
# </details>
# <details><summary>Hint 3</summary>
#
# There are `(len(order) - seen) // (batch * ranks)` steps. Step s of this rank begins at `seen + s * batch * ranks + rank *
# batch` and is `batch` long.
#
# </details>
#
# Twelve samples in the order 0 to 11, two ranks with batches of two. One step is done: `seen` is 4. On the left is the whole
# epoch of each rank, on the right what is left of it:

# %%
epoch = [[step * 4 + rank * 2 + place for step in range(3) for place in range(2)] for rank in range(2)]
plots.collective("the restart", epoch, [[sample for sample in mine if sample >= 4] for mine in epoch])


# %% check="remaining" points=2
def check_remaining(samples: int, seen: int, *, batch: int, ranks: int) -> None:
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(samples)).tolist()
    got = on_ranks(ranks, lambda rank: remaining(order, seen, batch=batch, rank=rank, ranks=ranks))

    def cut(left: list[int], *, incomplete=False, one_by_one=False) -> list[list[list[int]]]:
        """What is left, step by step, and each step divided among the ranks."""
        steps = [left[at : at + batch * ranks] for at in range(0, len(left), batch * ranks)]
        steps = [step for step in steps if incomplete or len(step) == batch * ranks]
        if one_by_one:
            return [[step[rank::ranks] for step in steps] for rank in range(ranks)]
        return [[step[rank * batch :][:batch] for step in steps] for rank in range(ranks)]

    def in_parts(left: list[int]) -> list[list[list[int]]]:
        size = len(left) // ranks
        firsts = range(0, size - batch + 1, batch)
        return [[left[rank * size :][first : first + batch] for first in firsts] for rank in range(ranks)]

    what = f"{ranks} ranks with batches of {batch}, {seen} of {samples} samples seen"
    mistakes = {
        "the epoch from its first sample: what is done would be done again": cut(order),
        "the epoch without `seen` batches of each rank: `seen` counts samples": [own[seen:] for own in cut(order)],
        "the epoch without `seen` samples of each rank: `seen` counts those of all ranks": [
            own[seen // batch :] for own in cut(order)
        ],
        "the epoch from the last whole step of these ranks: there may have been others before": cut(
            order[seen // (batch * ranks) * batch * ranks :]
        ),
        "a step dealt out one by one: a rank's part of it is a slice": cut(order[seen:], one_by_one=True),
        "one long part of the rest for each rank: in every step the ranks share the next samples": in_parts(
            order[seen:]
        ),
        "the same with an incomplete step at the end: ranks would have batches of different sizes, or none": cut(
            order[seen:], incomplete=True
        ),
        "the same without the last step, which is complete": [own[:-1] for own in cut(order[seen:])],
    }
    same(got, cut(order[seen:]), what, ranks=True, mistakes=mistakes)


check_remaining(40, 8, batch=2, ranks=2)
check_remaining(30, 12, batch=2, ranks=4)  # twelve were seen by three ranks with batches of 4, say
### BEGIN HIDDEN TESTS
check_remaining(31, 0, batch=3, ranks=3)
check_remaining(24, 24, batch=2, ranks=2)
check_remaining(25, 13, batch=1, ranks=4)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · Translate Slurm
#
# Under `srun` each task finds its place in Slurm's words. Return it in torchrun's: `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, and
# where to meet: `MASTER_ADDR`, the first node of the list, and `MASTER_PORT`, 10000 plus the job's number modulo 20000. All
# values are strings, as in an environment. A word that is missing must raise a `KeyError`: a rank that guesses that it is 0
# of 1 trains alone.
#
# | word | example | meaning |
# |---|---|---|
# | `SLURM_PROCID` | `5` | number of the task among all |
# | `SLURM_LOCALID` | `1` | number of the task on its node |
# | `SLURM_NODEID` | `2` | number of the node |
# | `SLURM_NTASKS` | `8` | how many tasks there are |
# | `SLURM_JOB_ID` | `1234567` | the job's number |
# | `SLURM_JOB_NODELIST` | `gpu[03-05,09],big1` | gpu03, gpu04, gpu05, gpu09 and big1 |


# %% solution="translate"
def translate(slurm: dict[str, str]) -> dict[str, str]:
    """A rank's place in torchrun's words, from Slurm's."""
    ### BEGIN SOLUTION
    nodes = slurm["SLURM_JOB_NODELIST"]
    name, bracket, numbers = nodes.partition("[")
    if "," in name or not bracket:  # the first node stands alone
        first = nodes.split(",")[0]
    else:
        first = name + numbers.replace("]", ",").replace("-", ",").split(",")[0]
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "MASTER_ADDR": first,
        "MASTER_PORT": str(10000 + int(slurm["SLURM_JOB_ID"]) % 20000),
    }
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three of the five are another name for the same string. The port must be the same on all nodes and another one for each job,
# so it is computed, not chosen.
#
# </details>
# <details><summary>Hint 2</summary>
#
# `slurm["SLURM_PROCID"]` raises a `KeyError` by itself; `slurm.get(…, "0")` does not. The first node of `gpu[03-05,09],big1`
# is `gpu` and what stands between `[` and the first `-`, `,` or `]`. Keep its zero. The first of `big1,gpu[03-05]` is what
# stands before the comma.
#
# </details>
# <details><summary>Hint 3</summary>
#
# `re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)` has two groups: the name, and the first number, which is `None` if there is no
# bracket. The address is `match[1] + (match[2] or "")`. The port is `str(10000 + int(slurm["SLURM_JOB_ID"]) % 20000)`.
#
# </details>
#
# The ports of many jobs: two that run at the same time hardly ever share one, and all stay below 32768, from where on the
# system gives ports to anybody.

# %%
numbers = range(1_200_000, 1_260_000, 100)
plots.curves(
    {"10000 + number % 20000": ([n / 1000 for n in numbers], [10000 + n % 20000 for n in numbers])},
    xlabel="the job's number (thousands)",
    ylabel="port",
)


# %% check="translate" points=2
def check_translate(nodes: str, first: str, *, job: int, nodes_count: int, per_node: int) -> None:
    tasks = nodes_count * per_node
    places = [divmod(task, per_node) for task in range(tasks)]
    told = [
        {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node), "SLURM_NTASKS": str(tasks)}
        | {"SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": nodes}
        for task, (node, local) in enumerate(places)
    ]
    got = alone(lambda: [translate(one) for one in told])

    def answer(task: int, *, rank=None, local=None, size=tasks, port=10000 + job % 20000) -> dict[str, str]:
        rank, local = task if rank is None else rank, places[task][1] if local is None else local
        words = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": size, "MASTER_ADDR": first, "MASTER_PORT": port}
        return {name: str(value) for name, value in words.items()}

    mistakes = {
        "a port that is the same for all jobs: two on one node would collide": [
            answer(t, port=29500) for t in range(tasks)
        ],
        "the number on the node as rank: there would be a rank 0 on every node": [
            answer(t, rank=places[t][1]) for t in range(tasks)
        ],
        "the number among all as local rank: no node has so many GPUs": [answer(t, local=t) for t in range(tasks)],
        "the node's number as local rank": [answer(t, local=places[t][0]) for t in range(tasks)],
        "the right numbers, but not as strings": [
            answer(t) | {"RANK": t, "LOCAL_RANK": places[t][1], "WORLD_SIZE": tasks, "MASTER_PORT": 10000 + job % 20000}
            for t in range(tasks)
        ],
    }
    what = f"job {job}, {tasks} tasks on {nodes}"
    same(got, [answer(task) for task in range(tasks)], what, ranks=True, mistakes=mistakes)

    def guesses(word: str):
        """What it makes of a word that is missing."""
        try:
            return translate({name: value for name, value in told[0].items() if name != word})
        except KeyError:
            return KeyError

    words = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_JOB_NODELIST")
    for word, guess in zip(words, alone(lambda: list(map(guesses, words)))):
        why = f"it guesses {guess}: let the KeyError out, or every rank may train in a world of its own"
        require(guess is KeyError, f"a KeyError without {word}", why)


check_translate("gpu[03-05,09],big1", "gpu03", job=1234567, nodes_count=5, per_node=2)
check_translate("login1", "login1", job=42, nodes_count=1, per_node=3)
### BEGIN HIDDEN TESTS
check_translate("big1,gpu[03-05]", "big1", job=20000, nodes_count=4, per_node=1)
check_translate("n[7,9-12]", "n7", job=39999, nodes_count=5, per_node=4)
check_translate("rack-a-n[001-128]", "rack-a-n001", job=777, nodes_count=3, per_node=1)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `save` is in `course_lib/checkpoint.py`, which also asks for the folder to be on the disk. `Batches` in
# `course_lib/data/batches.py` is the second. For Slurm there is no Python at all: `slurm/site.sh` and `slurm/rank_env.sh` are
# shell, so that the training program knows one dialect only. *Two jobs whose numbers differ by 20,000 share a node. What
# happens, and who would tell you?*
#
# **Next:** [lab 2](../lab2_break_it/lab2_break_it.ipynb), in which things break,
# then [06 · Scaling](../../notebooks/06_scaling.ipynb).
