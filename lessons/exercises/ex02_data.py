# %% [markdown]
# # Exercise 02 · Years on disk, batches ahead
#
# In lesson 02 a dataset kept neither data nor a list of samples, a few files stayed open, and a thread loaded the next
# batches. Here you write these three pieces yourself: the arithmetic that finds a sample, the files that are kept open, and
# the prefetcher. Each check compares yours with the simple way: everything in one array, every file opened, one batch after
# the other.
#
# Write in the cells that say `YOUR CODE HERE`, then run the check below. It is folded: it runs as it is, and a click opens
# it. A check that fails says where, and what it looks like; `print` works, too. A call that never comes back is stopped after
# five seconds, and you are told where it was. Stuck? Each task has three hints; open them one at a time.

# %%
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from queue import Full, Queue

import numpy as np
import torch

from course_lib import plots
from course_lib.checks import alone, prepare, require, same
from course_lib.prefetch import Prefetcher
from course_lib.timeline import Timeline

torch.set_num_threads(1)
prepare()

# %% [markdown]
# ## 1 · Find a sample
#
# Years lie in files with `lengths` rows, one after the other without a gap. Sample `index` is a pair: x is row `index`
# of all rows joined, and y the row `lead` later. Say where both are, as (file, row in that file), both counted from 0,
# without joining anything. Unlike in the lesson, a pair may begin in one year and end in the next, or even beyond a
# short one. The last `lead` rows have no y: for such an index raise `IndexError`, as a list would.


# %% solution="locate"
def locate(index: int, lengths: Sequence[int], lead: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """((file, row) of x, (file, row) of y)."""
    ### BEGIN SOLUTION
    starts = [0, *accumulate(lengths)]
    if index + lead >= starts[-1]:
        raise IndexError(f"sample {index} has no target")
    files = [bisect_right(starts, row) - 1 for row in (index, index + lead)]
    return tuple((file, row - starts[file]) for file, row in zip(files, (index, index + lead)))
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# x and y are the same question asked twice: in which file is row number so-and-so of all rows joined?
#
# </details>
# <details><summary>Hint 2</summary>
#
# At which row does each file begin? `[0, *accumulate(lengths)]` says it, and ends with the number of all rows. A row belongs
# to the last file that begins at this row or before it.
#
# </details>
# <details><summary>Hint 3</summary>
#
# With `starts` from above, `file = bisect_right(starts, row) - 1`, and the row in that file is `row - starts[file]`. Do it
# for `index` and for `index + lead`. If `index + lead >= starts[-1]`, raise `IndexError`.
#
# </details>
#
# Files of 30, 10 and 40 rows and a lead of 20: the row in its file, of x and of y, for all 60 samples. A line falls to zero
# where the next file begins. From sample 20 to 29, x is still in file 0 and y in file 2 already.

# %%
rows = np.concatenate([np.arange(length) for length in (30, 10, 40)])
plots.curves({"x": (range(60), rows[:60]), "y": (range(60), rows[20:])}, xlabel="sample", ylabel="row in its file")


# %% check="locate" points=2
def check_locate(lengths: list[int], lead: int) -> None:
    places = [(file, row) for file, length in enumerate(lengths) for row in range(length)]  # of all rows joined
    samples, what = len(places) - lead, f"files of {lengths} rows, lead {lead}"

    def ask(index):
        try:
            return locate(index, lengths, lead)
        except IndexError as error:
            error.args = (f"{error} (for sample {index}; samples 0 to {samples - 1} have a y)",)
            raise

    got = alone(lambda: [ask(index) for index in range(samples)])
    now, then = places[:samples], places[lead:]
    past = [(f, r) if r < lengths[f] else (f + 1, r - lengths[f]) for f, r in ((f, r + lead) for f, r in now)]
    late = [(f, r) if r or not f else (f - 1, lengths[f - 1]) for f, r in places]
    mistakes = {
        "a y in the file of x, beyond its end": list(zip(now, [(f, r + lead) for f, r in now])),
        "a y in the next file at most: a lead may be longer than a file": list(zip(now, past)),
        "a row counted from the first file: count it in its own": [
            ((x, i), (y, i + lead)) for i, ((x, _), (y, _)) in enumerate(zip(now, then))
        ],
        "a file's first row given to the file before: bisect_left instead of bisect_right?": list(
            zip(late, late[lead:])
        ),
    }
    same(got, list(zip(now, then)), what, mistakes=mistakes)

    def found(index):
        try:
            locate(index, lengths, lead)
        except IndexError:
            return False
        return True

    beyond = alone(lambda: [index for index in range(samples, len(places) + 1) if found(index)])
    why = f"there are {samples} samples, and no IndexError for number {beyond}: a loop over the dataset would go on"
    require(not beyond, f"the end, {what}", why)


check_locate([3, 1, 4], 2)
### BEGIN HIDDEN TESTS
check_locate([5, 5], 0)
check_locate([2, 1, 1, 1, 6], 3)
check_locate([7], 1)
### END HIDDEN TESTS

# %% [markdown]
# ## 2 · Keep files open
#
# Opening is slow, but only so many files may be open at once. Return a function `get(name)` that gives an open file. A
# file that is still open is not opened again. No more than `limit` may be open at any moment: before another one is
# opened, close the one whose last request is the longest ago. Files open with `open_file(name)` and close with their
# method `.close()`.


# %% solution="handles"
def keep_open(open_file: Callable, limit: int) -> Callable:
    """A function that gives open files by name."""
    ### BEGIN SOLUTION
    handles = OrderedDict()

    def get(name):
        if name not in handles:
            if len(handles) == limit:
                _, oldest = handles.popitem(last=False)
                oldest.close()
            handles[name] = open_file(name)
        handles.move_to_end(name)
        return handles[name]

    return get
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The function `get` is defined inside of `keep_open` and remembers in a dictionary which files are open. What must it do
# when a name is in there, and what when it is not?
#
# </details>
# <details><summary>Hint 2</summary>
#
# A dictionary keeps the order in which names were put in. That is not the order in which they were asked for last: a file
# that is asked for again must move to the end. `OrderedDict` has `move_to_end(name)` and `popitem(last=False)`.
#
# </details>
# <details><summary>Hint 3</summary>
#
# If the name is not in `handles`: when `len(handles) == limit`, take the first out with `popitem(last=False)`, which gives
# its name and the file, and close it; then open the new one. In any case `handles.move_to_end(name)` and return the file.
#
# </details>
#
# Twelve requests for files A to D, in an order with favourites. How often a file has to be opened depends on how many may
# stay:

# %%
requests = "ABACADABACBA"


def count_opens(limit: int) -> int:
    """What functools has for the same purpose, asked how often it did not have the file; it never closes one."""
    cache = lru_cache(limit)(lambda name: name)
    for name in requests:
        cache(name)
    return cache.cache_info().misses


plots.bars({f"at most {limit} open": count_opens(limit) for limit in (1, 2, 3, 4)}, xlabel="files opened")


# %% check="handles" points=2
class File:
    """Notes in a log what happens to it: "+A" is opened, "-A" closed."""

    def __init__(self, name, log):
        self.name, self.log, self.is_open = name, log, True
        log.append(f"+{name}")

    def close(self):
        self.is_open = False
        self.log.append(f"-{self.name}")


def expected(names: str, limit: int, again: bool = True) -> list[str]:
    """again: whether a file that is asked for again counts as young again."""
    log, kept = [], []
    for name in names:
        if name not in kept:
            if len(kept) == limit:
                log.append(f"-{kept.pop(0)}")
            log.append(f"+{name}")
            kept.append(name)
        elif again:
            kept.append(kept.pop(kept.index(name)))
    return log


def check_handles(names: str, limit: int) -> None:
    def run():
        given, log = [], []
        get = keep_open(lambda name: File(name, log), limit)
        for name in names if callable(get) else "":
            file = get(name)
            given.append(getattr(file, "name", file) if getattr(file, "is_open", True) else "a closed file")
        return given if callable(get) else get, log

    given, log = alone(run)
    what = f"for requests {names}, at most {limit} open"
    same(given, list(names), f"files {what}")
    opened, wanted = [f"+{name}" for name in names], expected(names, limit)
    late = wanted.copy()  # with each closing after the opening that it makes room for
    for place, call in enumerate(wanted):
        if call[0] == "-":
            late[place : place + 2] = wanted[place + 1], call
    mistakes = {
        "opening for every request: keep what is open": opened,
        "opening and closing for every request: keep what is open": [
            f"{sign}{name}" for name in names for sign in "+-"
        ],
        "what comes out if nothing is ever closed": list(dict.fromkeys(opened)),
        "forgetting a file without closing it: it stays open": [call for call in wanted if call[0] == "+"],
        "closing a file after the next one is opened: for a moment there is one too many": late,
        "keeping one more than the limit": expected(names, limit + 1),
        "closing the file that was opened first, even if it was asked for a moment ago": expected(
            names, limit, again=False
        ),
    }
    held = max(sum({"+": 1, "-": -1}[call[0]] for call in log[:end]) for end in range(len(log) + 1))
    same(log, wanted, f"opened (+) and closed (-) {what}; {held} were open at once", mistakes=mistakes)


check_handles("ABACADABACBA", 2)
### BEGIN HIDDEN TESTS
check_handles("ABCABDABEABF", 3)
check_handles("AABBA", 1)
check_handles("ABCCBA", 5)
### END HIDDEN TESTS

# %% [markdown]
# ## 3 · Load ahead
#
# Write a generator that gives a loader's batches in their order, while a thread loads the next ones into a queue with room
# for `depth`. Four promises. Nothing is lost, whatever a batch is, even `None`. The thread waits while the queue is full.
# An error of the loader comes out of the generator where it happened, after the good batches. When the loop ends, breaks
# off or fails, no thread stays behind, not even one that waits for room in the queue, and nothing more is loaded.


# %% solution="prefetch"
def prefetch(batches: Iterable, depth: int) -> Iterator:
    """The same batches, up to `depth` of them loaded ahead."""
    ### BEGIN SOLUTION
    queue, stop = Queue(depth), threading.Event()

    def put(kind, value):
        while not stop.is_set():
            try:
                return queue.put((kind, value), timeout=0.02)
            except Full:
                pass

    def load():
        try:
            for batch in batches:
                put("batch", batch)
                if stop.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    try:
        while True:
            kind, value = queue.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stop.set()
        thread.join()
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two loops share a `Queue(depth)`. The thread's loop goes through `batches` and puts; the generator's loop gets and yields.
# How does the second learn that the first has ended, or failed? Put pairs into the queue: a word that says what it is, and
# the thing itself.
#
# </details>
# <details><summary>Hint 2</summary>
#
# In the thread, `try` around the loop: after it put `("end", None)`, and in `except BaseException as error` put
# `("error", error)`. The generator returns at the one and raises the other. Its own loop stands in a `try` with a `finally`,
# which also runs when somebody leaves the generator early. There it must tell the thread to stop, and `join` it.
#
# </details>
# <details><summary>Hint 3</summary>
#
# A thread that waits in `queue.put(item)` for ever never sees that it should stop. Let it wait for a moment only, again
# and again: `while not stop.is_set():`, in it `try: queue.put(item, timeout=0.02)` and leave this loop,
# `except Full: pass`. `stop` is a `threading.Event()`, which the `finally` sets before it joins the thread. After each
# batch the thread's other loop must look at `stop`, too, and end; or it would read all that is left, for nobody.
#
# </details>
#
# The course's own prefetcher, with a loader and a loop that sleep for 20 ms each instead of working. Above they take turns,
# below they overlap:


# %%
def slow_loader():
    for number in range(8):
        time.sleep(0.02)
        yield number


plain, ahead = Timeline(), Timeline()
for timeline, loader in (plain, plain.watch(slow_loader())), (ahead, Prefetcher(ahead.watch(slow_loader()))):
    for _ in loader:
        with timeline.span("compute"):
            time.sleep(0.02)
plots.timelines({"in turn": plain, "loaded ahead": ahead})


# %% check="prefetch" points=4
def wait_until(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def check_order(batches: list, depth: int) -> None:
    mistakes = {"everything but the last batch": batches[:-1], "an end mark as a batch": [*batches, None]}
    if None in batches:
        mistakes["cut off at a batch that is None: that is no good end mark"] = batches[: batches.index(None)]

    def run():
        found = prefetch(batches, depth)
        return list(found) if isinstance(found, Iterable) else found

    same(alone(run), batches, f"{len(batches)} batches in order, depth {depth}", mistakes=mistakes)


def check_ahead(depth: int) -> None:
    def run():
        loaded = []  # by which thread

        def loader():
            for number in range(depth + 20):
                loaded.append(threading.get_ident())
                yield number

        batches = iter(prefetch(loader(), depth))
        next(batches)
        wait_until(lambda: len(loaded) > depth, 2)
        wait_until(lambda: len(loaded) > depth + 2, 0.2)  # it should not come to that
        return len(loaded), threading.get_ident() in loaded

    count, in_turn = alone(run)
    what = f"depth {depth}"
    require(not in_turn, f"a thread loads, {what}", "the loop's own thread has loaded batches: nothing can overlap")
    why = f"{count - 1} batches were loaded while the loop was busy with the first; {depth} should be, and one in hand"
    require(count > depth, f"loads ahead, {what}", why)
    require(count <= depth + 2, f"not too far ahead, {what}", f"{why}. Is the queue bounded?")


def check_error(good: int, depth: int) -> None:
    def broken():
        yield from range(good)
        raise OSError("the disk is gone")

    def run():
        got = []
        try:
            for batch in prefetch(broken(), depth):
                got.append(batch)  # one by one: what came before the error stays
        except OSError as error:
            got.append(str(error))
        return got

    wanted = [*range(good), "the disk is gone"]
    mistakes = {
        "the end without the error: whoever trains would not notice": wanted[:-1],
        "the error before the good batches": wanted[-1:],
    }
    same(alone(run), wanted, f"{good} batches and an error, depth {depth}", mistakes=mistakes)


def check_leaving(taken: int, depth: int) -> None:
    def run():
        before, loaded = set(threading.enumerate()), []

        def loader():
            for number in range(taken + depth + 20):
                loaded.append(number)
                yield number

        for _ in zip(range(taken), batches := iter(prefetch(loader(), depth))):
            pass
        getattr(batches, "close", lambda: None)()  # what Python does when a loop is left
        return wait_until(lambda: set(threading.enumerate()) <= before, 1), len(loaded)

    gone, count = alone(run)
    what = f"leaving after batch {taken}, depth {depth}"
    why = "a second later the thread is still there: it waits for room in the queue, or was never told to stop"
    require(gone, what, why)
    why = f"{count} batches were loaded: the thread went on for nobody. Its loop must end when it is told to stop"
    require(count <= taken + depth + 3, f"no more is loaded, {what}", why)


check_order([3, 1, 4, 1, 5, 9, 2, 6], 2)
check_order([0, None, []], 1)
check_ahead(2)
check_error(3, 2)
check_leaving(1, 2)
### BEGIN HIDDEN TESTS
check_order(list(range(50)), 7)
check_order([], 3)
check_ahead(5)
check_error(0, 1)
check_error(1, 4)
check_leaving(5, 1)
### END HIDDEN TESTS

# %% [markdown]
# ## Where this is used
#
# `YearsDataset` in `course_lib/data/years.py` has the first two (`locate` and `_readers`), and `Prefetcher` in
# `course_lib/prefetch.py` the third, which also copies to a GPU meanwhile. It ends its thread in another way than the hints
# here. *Which one ends sooner, and what does each cost while nothing goes wrong?*
#
# **Next:** [03 · DataParallel](../../notebooks/03_data_parallel.ipynb).
