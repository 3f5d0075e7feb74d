# Plausible wrong answers to exercise 04. "# %% function: words" says what the check must say.

# %% average: the sum over the ranks
def average(model):
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)


# %% average: was left alone in `average`, line 4
def average(model):
    for parameter in model.parameters():
        if parameter.grad is not None:  # fewer calls where a layer was not used
            dist.barrier()
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


# %% average: each rank's own gradient
def average(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.clone().div_(dist.get_world_size())


# %% average: in `average`, line 3
def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


# %% average: right but for a parameter whose grad was None
def average(model):
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


# %% buckets: one tensor a bucket
def make_buckets(sizes, limit):
    return [[number] for number in range(len(sizes))]


# %% buckets: without the last bucket
def make_buckets(sizes, limit):
    buckets, bucket, size = [], [], 0
    for number, more in enumerate(sizes):
        if bucket and size + more > limit:
            buckets.append(bucket)
            bucket, size = [], 0
        bucket.append(number)
        size += more
    return buckets


# %% buckets: A loop without an end
def make_buckets(sizes, limit):
    buckets, number = [], 0
    while number < len(sizes):
        bucket = []
        while number < len(sizes) and sum(sizes[n] for n in bucket) + sizes[number] <= limit:  # 90 never fits
            bucket.append(number)
            number += 1
    return buckets


# %% send: one message a parameter
def average_in_buckets(buckets):
    for bucket in buckets:
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


# %% send: the mean of the weights
def average_in_buckets(buckets):
    for bucket in buckets:
        flat = torch.cat([p.detach().flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket])):
            parameter.grad = part.view_as(parameter)


# %% send: the average stayed in the flat tensor
def average_in_buckets(buckets):
    for bucket in buckets:
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()


# %% send: right but for a parameter whose grad was None
def average_in_buckets(buckets):
    for bucket in buckets:
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket])):
            if parameter.grad is not None:
                parameter.grad.copy_(part.view_as(parameter))


# %% send: the last one is full
def average_in_buckets(buckets):
    everything = [p for bucket in buckets for p in bucket]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in everything])
    dist.all_reduce(flat)
    for parameter, part in zip(everything, flat.split([p.numel() for p in everything])):
        parameter.grad = part.view_as(parameter) / dist.get_world_size()


# %% deal: same order: set_epoch
def deal(samples, epoch, rank, ranks):
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(0))
    return order[: samples // ranks * ranks][rank::ranks].tolist()


# %% deal: do all ranks shuffle with the same seed
def deal(samples, epoch, rank, ranks):
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch + rank))
    return order[: samples // ranks * ranks][rank::ranks].tolist()


# %% deal: the ranks have [8, 8, 7]
def deal(samples, epoch, rank, ranks):
    return torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))[rank::ranks].tolist()


# %% deal: a piece of the order for each rank
def deal(samples, epoch, rank, ranks):
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[rank * (samples // ranks) :][: samples // ranks]


# %% deal: rank 0 has the same samples in every epoch
def deal(samples, epoch, rank, ranks):
    share = torch.arange(samples // ranks * ranks)[rank::ranks]
    return share[torch.randperm(len(share), generator=torch.Generator().manual_seed(epoch))].tolist()


# %% deal: each number from 0 to 19 once
def deal(samples, epoch, rank, ranks):
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)) + 1
    return order[: samples // ranks * ranks][rank::ranks].tolist()


# %% deal: is there a return?
def deal(samples, epoch, rank, ranks):
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
    order[: samples // ranks * ranks][rank::ranks].tolist()


# %% rate: the rate of one rank
def rate(step, *, lr, ranks, warmup):
    return lr * min(1, (step + 1) / warmup)


# %% rate: a rate of zero at step 0
def rate(step, *, lr, ranks, warmup):
    return lr * ranks * min(1, step / warmup)
