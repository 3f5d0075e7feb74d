# Plausible wrong answers to exercise 12. "# %% task: words" says what the check must say.

# %% share: its batch is dimension 1, also with batch_first
def share(rows, memory, rank, ranks):
    return rows.tensor_split(ranks)[rank], tuple(part.tensor_split(ranks)[rank] for part in memory)


# %% share: whole on every rank
def share(rows, memory, rank, ranks):
    return rows.tensor_split(ranks)[rank], memory


# %% share: rank 3 failed in `share`, line 3
def share(rows, memory, rank, ranks):
    # of 6 samples, 4 asked for: 2, 2, 2
    return rows.chunk(ranks)[rank], tuple(part.chunk(ranks, dim=1)[rank] for part in memory)


# %% share: take consecutive ones
def share(rows, memory, rank, ranks):
    return rows[rank::ranks], tuple(part[:, rank::ranks] for part in memory)


# %% accuracy: repeated digits count twice
def accuracy(right, digits, rank, ranks):
    sums = torch.tensor([right.sum(), len(right)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


# %% accuracy: a rank with fewer digits counts as much
def accuracy(right, digits, rank, ranks):
    own = right[rank + ranks * torch.arange(len(right)) < digits]
    share = own.double().mean()
    dist.all_reduce(share)
    return share.item() / ranks


# %% accuracy: was left alone in `accuracy`
def accuracy(right, digits, rank, ranks):
    own = right[rank + ranks * torch.arange(len(right)) < digits]
    if not len(own):  # nothing to add
        return 0.0
    total = own.sum()
    dist.all_reduce(total)
    return total.item() / digits


# %% clip: the norm is that of all ranks together
def clip(gradients, limit):
    norm = sum(gradient.square().sum() for gradient in gradients) ** 0.5
    if norm > limit:
        for gradient in gradients:
            gradient *= limit / norm
    return float(norm)


# %% clip: add up squares, then take the root
def clip(gradients, limit):
    norm = torch.tensor(sum(gradient.square().sum().item() for gradient in gradients) ** 0.5)
    dist.all_reduce(norm)
    for gradient in gradients:
        gradient *= min(1, limit / norm.item())
    return norm.item()


# %% clip: below the limit they stay
def clip(gradients, limit):
    squares = torch.tensor(sum(gradient.square().sum().item() for gradient in gradients))
    dist.all_reduce(squares)
    for gradient in gradients:
        gradient *= limit / squares.sqrt()
    return squares.sqrt().item()


# %% clip: was left alone in `clip`
def clip(gradients, limit):
    squares = torch.tensor(sum(gradient.square().sum().item() for gradient in gradients))
    if squares.sqrt() > limit:
        dist.all_reduce(squares)
        for gradient in gradients:
            gradient *= limit / squares.sqrt()
    return squares.sqrt().item()


# %% clip: are they scaled in place
def clip(gradients, limit):
    squares = torch.tensor(sum(gradient.square().sum().item() for gradient in gradients))
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    for gradient in gradients:
        gradient = gradient * min(1, limit / norm)
    return norm
