# Plausible wrong answers to exercise 00. "# %% function: words" says what the check must say.

# %% share: the last samples belong to nobody
def my_share(samples, rank, ranks):
    size = samples // ranks
    return range(rank * size, (rank + 1) * size)


# %% share: all of the remainder for the last rank
def my_share(samples, rank, ranks):
    size = samples // ranks
    return range(rank * size, samples if rank == ranks - 1 else (rank + 1) * size)


# %% share: from too early on
def my_share(samples, rank, ranks):
    size = samples // ranks
    first = rank * size
    return range(first, first + size + (rank < samples % ranks))


# %% share: a share rounded up
def my_share(samples, rank, ranks):
    size = (samples + ranks - 1) // ranks
    return range(rank * size, min(samples, (rank + 1) * size))


# %% share: dealing like cards
def my_share(samples, rank, ranks):
    return range(rank, samples, ranks)


# %% mean: the mean of the ranks' means
def mean_of_all(values):
    mean = values.mean()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


# %% mean: this rank's own count: add up the counts, too
def mean_of_all(values):
    total = values.sum()
    dist.all_reduce(total)
    return (total / len(values)).item()


# %% mean: was left alone in `mean_of_all`, line 4
def mean_of_all(values):
    if len(values):  # the others wait for those who have none
        total = torch.tensor([values.sum(), len(values)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()
    return 0.0


# %% collect: was left alone in `collect`, line 4
def collect(thing):
    if dist.get_rank() == 0:
        places = [None] * dist.get_world_size()
        dist.gather_object(thing, places)
        return places
    return None


# %% collect: only rank 0 is to return it
def collect(thing):
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, thing)
    return places


# %% collect: it fills `places`
def collect(thing):
    places = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    return dist.gather_object(thing, places)
