# Plausible wrong answers to exercise 07. "# %% function: words" says what the check must say.

# %% order: this is GPipe, all forward first
def order(stage, stages, micro_batches):
    forward = [("forward", number) for number in range(micro_batches)]
    return forward + [("backward", number) for number in range(micro_batches)][::-1]


# %% order: some stage could go forward earlier
def order(stage, stages, micro_batches):
    return [slot for number in range(micro_batches) for slot in (("forward", number), ("backward", number))]


# %% order: stage 0 keeps 4 micro-batches at the same time, and may keep 3
def order(stage, stages, micro_batches):
    ahead = min(stages - stage, micro_batches)  # one too many
    work = [("forward", number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        work += [("forward", number), ("backward", number - ahead)]
    return work + [("backward", number) for number in range(micro_batches - ahead, micro_batches)]


# %% order: stage 0 leaves out [('backward', 3), ('backward', 4)]
def order(stage, stages, micro_batches):
    ahead = min(stages - stage - 1, micro_batches)
    work = [("forward", number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        work += [("forward", number), ("backward", number - ahead)]
    return work


# %% order: a deadlock: stage 0 at backward 4
def order(stage, stages, micro_batches):
    ahead = min(stages - stage - 1, micro_batches)
    work = [("forward", number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        work += [("forward", number), ("backward", micro_batches - 1 - number + ahead)]  # the newest first, as in GPipe
    return work + [("backward", number) for number in reversed(range(ahead))]


# %% order: the oldest goes backward first, 3 stages, 5 micro-batches: stage 0 takes 4 backward before 1
def order(stage, stages, micro_batches):
    ahead = min(stages - stage - 1, micro_batches)
    work = [("forward", number) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        work += [("forward", number), ("backward", number)]  # the newest first
    return work + [("backward", number) for number in reversed(range(ahead))]


# %% order: has ('forward', 5), which is none of
def order(stage, stages, micro_batches):
    return [("forward", number + 1) for number in range(micro_batches)]


# %% step: divide each loss by their number
def step(stage, x, y, micro_batches):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept = []
    for inputs, targets in zip(x.chunk(micro_batches), y.chunk(micro_batches)):
        if rank > 0:
            inputs = torch.empty_like(inputs)
            dist.recv(inputs, rank - 1)
            inputs.requires_grad_()
        outputs = stage(inputs)
        if rank < last:
            dist.send(outputs.detach(), rank + 1)
        else:
            outputs = F.mse_loss(outputs, targets)
        kept.append((inputs, outputs))
    for inputs, outputs in reversed(kept):
        gradient = None
        if rank < last:
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, rank + 1)
        outputs.backward(gradient)
        if rank > 0:
            dist.send(inputs.grad, rank - 1)


# %% step: a pipeline needs micro-batches
def step(stage, x, y, micro_batches):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    inputs = x
    if rank > 0:
        inputs = torch.empty_like(x)
        dist.recv(inputs, rank - 1)
        inputs.requires_grad_()
    outputs = stage(inputs)
    if rank < last:
        dist.send(outputs.detach(), rank + 1)
        gradient = torch.empty_like(outputs)
        dist.recv(gradient, rank + 1)
        outputs.backward(gradient)
    else:
        F.mse_loss(outputs, y).backward()
    if rank > 0:
        dist.send(inputs.grad, rank - 1)


# %% step: all other stages stand still
def step(stage, x, y, micro_batches):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for inputs, targets in zip(x.chunk(micro_batches), y.chunk(micro_batches)):
        if rank > 0:
            inputs = torch.empty_like(inputs)
            dist.recv(inputs, rank - 1)
            inputs.requires_grad_()
        outputs = stage(inputs)
        if rank < last:
            dist.send(outputs.detach(), rank + 1)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, rank + 1)
            outputs.backward(gradient)
        else:
            (F.mse_loss(outputs, targets) / micro_batches).backward()
        if rank > 0:
            dist.send(inputs.grad, rank - 1)


# %% step: a gradient on the last stage only
def step(stage, x, y, micro_batches):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    losses = []
    for inputs, targets in zip(x.chunk(micro_batches), y.chunk(micro_batches)):
        if rank > 0:
            inputs = torch.empty_like(inputs)
            dist.recv(inputs, rank - 1)
        outputs = stage(inputs)
        if rank < last:
            dist.send(outputs.detach(), rank + 1)
        else:
            losses.append(F.mse_loss(outputs, targets) / micro_batches)
    for loss in losses:
        loss.backward()


# %% step: in `step`, line 17
def step(stage, x, y, micro_batches):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept = []
    for inputs, targets in zip(x.chunk(micro_batches), y.chunk(micro_batches)):
        if rank > 0:
            inputs = torch.empty_like(inputs)
            dist.recv(inputs, rank - 1)  # and nothing learns from it
        outputs = stage(inputs)
        if rank < last:
            dist.send(outputs.detach(), rank + 1)
        else:
            outputs = F.mse_loss(outputs, targets) / micro_batches
        kept.append((inputs, outputs))
    for inputs, outputs in reversed(kept):
        if rank == last:
            outputs.backward()
            dist.send(inputs.grad, rank - 1)
        else:
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, rank + 1)
            outputs.backward(gradient)
            if rank > 0:
                dist.send(inputs.grad, rank - 1)


# %% halo: they wait for each other: a deadlock
def with_halo(strip):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    above, below = torch.zeros_like(strip[0]), torch.zeros_like(strip[0])
    if rank > 0:
        dist.recv(above, rank - 1)
    if rank < last:
        dist.recv(below, rank + 1)
    if rank > 0:
        dist.send(strip[0], rank - 1)
    if rank < last:
        dist.send(strip[-1], rank + 1)
    return torch.cat([above[None], strip, below[None]])


# %% halo: nothing came from the neighbours
def with_halo(strip):
    return F.pad(strip, (0, 0, 1, 1))


# %% halo: nothing came from the rank below
def with_halo(strip):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    above, below = torch.zeros_like(strip[0]), torch.zeros_like(strip[0])
    if rank > 0:
        dist.recv(above, rank - 1)
    if rank < last:
        dist.send(strip[-1], rank + 1)
    return torch.cat([above[None], strip, below[None]])


# %% halo: from above comes its last row
def with_halo(strip):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    above, below = torch.zeros_like(strip[0]), torch.zeros_like(strip[0])
    work = []
    if rank > 0:
        work += [dist.isend(strip[-1], rank - 1), dist.irecv(above, rank - 1)]
    if rank < last:
        work += [dist.isend(strip[0], rank + 1), dist.irecv(below, rank + 1)]
    for one in work:
        one.wait()
    return torch.cat([above[None], strip, below[None]])


# %% halo: the first and the last rank are no neighbours here
def with_halo(strip):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    above, below = torch.zeros_like(strip[0]), torch.zeros_like(strip[0])
    up, down = (rank - 1) % ranks, (rank + 1) % ranks
    work = [dist.isend(strip[0].clone(), up, tag=1), dist.isend(strip[-1].clone(), down, tag=2)]
    work += [dist.irecv(below, down, tag=1), dist.irecv(above, up, tag=2)]
    for one in work:
        one.wait()
    return torch.cat([above[None], strip, below[None]])


# %% halo: shape (3, 7), expected (5, 5)
def with_halo(strip):
    return F.pad(strip, (1, 1))
