# Plausible wrong answers to exercise 02. "# %% function: words" says what the check must say.

# %% locate: beyond its end
def locate(index, lengths, lead):
    starts = [0, *accumulate(lengths)]
    if index + lead >= starts[-1]:
        raise IndexError(index)
    file = bisect_right(starts, index) - 1
    row = index - starts[file]
    return (file, row), (file, row + lead)


# %% locate: a lead may be longer than a file
def locate(index, lengths, lead):
    if index + lead >= sum(lengths):
        raise IndexError(index)
    file, row = 0, index
    while row >= lengths[file]:
        row -= lengths[file]
        file += 1
    if row + lead < lengths[file]:
        return (file, row), (file, row + lead)
    return (file, row), (file + 1, row + lead - lengths[file])


# %% locate: bisect_left instead of bisect_right
def locate(index, lengths, lead):
    from bisect import bisect_left

    starts = [0, *accumulate(lengths)]
    if index + lead >= starts[-1]:
        raise IndexError(index)
    files = [max(0, bisect_left(starts, row) - 1) for row in (index, index + lead)]
    return tuple((file, row - starts[file]) for file, row in zip(files, (index, index + lead)))


# %% locate: no IndexError for number [6, 7, 8]
def locate(index, lengths, lead):
    starts = [0, *accumulate(lengths)]
    files = [bisect_right(starts, row) - 1 for row in (index, index + lead)]
    return tuple((file, row - starts[file]) for file, row in zip(files, (index, index + lead)))


# %% handles: nothing is ever closed
def keep_open(open_file, limit):
    handles = {}

    def get(name):
        if name not in handles:
            handles[name] = open_file(name)
        return handles[name]

    return get


# %% handles: even if it was asked for a moment ago
def keep_open(open_file, limit):
    handles = {}

    def get(name):
        if name not in handles:
            if len(handles) == limit:
                handles.pop(next(iter(handles))).close()
            handles[name] = open_file(name)
        return handles[name]

    return get


# %% handles: 3 were open at once
def keep_open(open_file, limit):
    handles = OrderedDict()

    def get(name):
        if name not in handles:
            handles[name] = open_file(name)
            if len(handles) > limit:
                handles.popitem(last=False)[1].close()
        handles.move_to_end(name)
        return handles[name]

    return get


# %% prefetch: that is no good end mark
def prefetch(batches, depth):
    queue, stop = Queue(depth), threading.Event()

    def load():
        for batch in batches:
            queue.put(batch)
        queue.put(None)

    threading.Thread(target=load, daemon=True).start()
    while (batch := queue.get()) is not None:
        yield batch


# %% prefetch: Is the queue bounded
def prefetch(batches, depth):
    queue, end = Queue(), object()

    def load():
        for batch in batches:
            queue.put(batch)
        queue.put(end)

    threading.Thread(target=load, daemon=True).start()
    while (batch := queue.get()) is not end:
        yield batch


# %% prefetch: whoever trains would not notice
def prefetch(batches, depth):
    queue, end = Queue(depth), object()

    def load():
        try:
            for batch in batches:
                queue.put(batch)
        finally:
            queue.put(end)

    threading.Thread(target=load, daemon=True).start()
    while (batch := queue.get()) is not end:
        yield batch


# %% prefetch: waits for room in the queue, or was never told to stop
def prefetch(batches, depth):
    queue = Queue(depth)

    def load():
        try:
            for batch in batches:
                queue.put(("batch", batch))
            queue.put(("end", None))
        except BaseException as error:
            queue.put(("error", error))

    threading.Thread(target=load, daemon=True).start()
    while True:
        kind, value = queue.get()
        if kind == "end":
            return
        if kind == "error":
            raise value
        yield value


# %% prefetch: (`thread.join()`)
def prefetch(batches, depth):
    queue, stop = Queue(depth), threading.Event()

    def load():
        try:
            for batch in batches:
                if stop.is_set():
                    return
                queue.put(("batch", batch))
            queue.put(("end", None))
        except BaseException as error:
            queue.put(("error", error))

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
        stop.set()  # the thread does not see it: it waits in put
        thread.join()


# %% prefetch: went on for nobody
def prefetch(batches, depth):
    queue, stop = Queue(depth), threading.Event()

    def put(item):
        while not stop.is_set():
            try:
                return queue.put(item, timeout=0.02)
            except Full:
                pass

    def load():
        try:
            for batch in batches:
                put(("batch", batch))  # told to stop, it puts nothing, but reads on
            put(("end", None))
        except BaseException as error:
            put(("error", error))

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
