# Plausible wrong answers to exercise 06. "# %% function: words" says what the check must say.

# %% ring: whole messages
def ring_seconds(ranks, size, *, alpha, beta):
    return 2 * (ranks - 1) * (alpha + size * beta)


# %% ring: n rounds instead of n − 1
def ring_seconds(ranks, size, *, alpha, beta):
    return 2 * ranks * (alpha + size / ranks * beta)


# %% ring: half of it
def ring_seconds(ranks, size, *, alpha, beta):
    return (ranks - 1) * (alpha + size / ranks * beta)


# %% ring: alpha counted once
def ring_seconds(ranks, size, *, alpha, beta):
    return alpha + 2 * (ranks - 1) / ranks * size * beta


# %% speed: the other kind of scaling
def speed_ups(seconds, *, weak):
    return {n: (seconds[1] / taken, seconds[1] / taken / n) for n, taken in seconds.items()}


# %% speed: upside down
def speed_ups(seconds, *, weak):
    found = {n: taken / seconds[1] / (n if weak else 1) for n, taken in seconds.items()}
    return {n: (speed_up, speed_up / n) for n, speed_up in found.items()}


# %% speed: divided by n twice
def speed_ups(seconds, *, weak):
    found = {n: seconds[1] / taken * (n if weak else 1) for n, taken in seconds.items()}
    return {n: (speed_up, speed_up / n**2 if weak else speed_up / n) for n, speed_up in found.items()}


# %% iou: the mean of the ranks' IoUs: add up
def iou_of_all(found, real):
    mine = (found & real).sum() / (found | real).sum()
    dist.all_reduce(mine)
    return mine.item() / dist.get_world_size()


# %% iou: in which the intersection counts twice
def iou_of_all(found, real):
    sums = torch.stack([(found & real).sum(), found.sum() + real.sum()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item() if sums[1] else 1.0


# %% iou: was left alone in `iou_of_all`, line 6
def iou_of_all(found, real):
    if not (found | real).any():  # nothing on this rank: but the others wait for it
        return 1.0
    sums = torch.stack([(found & real).sum(), (found | real).sum()])
    # all ranks together
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


# %% iou: ZeroDivisionError
def iou_of_all(found, real):
    sums = torch.stack([(found & real).sum(), (found | real).sum()])
    dist.all_reduce(sums)
    common, union = sums.tolist()
    return common / union


# %% iou: there was nothing to find, which is perfect
def iou_of_all(found, real):
    sums = torch.stack([(found & real).sum(), (found | real).sum()])
    dist.all_reduce(sums)
    common, union = sums.tolist()
    return common / union if union else 0.0


# %% iou: (1, 1) images on the ranks, no nucleus anywhere: rank 0: nan, expected 1
def iou_of_all(found, real):
    sums = torch.stack([(found & real).sum(), (found | real).sum()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()
