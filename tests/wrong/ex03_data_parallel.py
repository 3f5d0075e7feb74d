# Plausible wrong answers to exercise 03. "# %% function: words" says what the check must say.

# %% scatter: as torch.chunk cuts
def scatter(batch, devices):
    return list(batch.chunk(devices))


# %% scatter: lost its last samples
def scatter(batch, devices):
    size = len(batch) // devices
    return [batch[device * size : (device + 1) * size] for device in range(devices)]


# %% scatter: nothing to do
def scatter(batch, devices):
    return list(batch.tensor_split(devices))


# %% scatter: in another order
def scatter(batch, devices):
    return [batch[device::devices] for device in range(devices)]


# %% apply: waited two seconds for the others
def apply_all(replicas, pieces):
    return torch.cat([replica(piece) for replica, piece in zip(replicas, pieces)])


# %% apply: the order in which the outputs were ready
def apply_all(replicas, pieces):
    outputs = []
    threads = [
        threading.Thread(target=lambda replica=replica, piece=piece: outputs.append(replica(piece)))
        for replica, piece in zip(replicas, pieces)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat(outputs)


# %% apply: stayed in its thread
def apply_all(replicas, pieces):
    outputs = {}

    def call(number):
        outputs[number] = replicas[number](pieces[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(pieces))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return torch.cat([outputs[number] for number in sorted(outputs)])


# %% gradients: the mean of the pieces' own losses
def gradients(replicas, pieces, target, loss_function):
    targets = target.tensor_split(len(pieces))
    for replica, piece, part in zip(replicas, pieces, targets):
        loss_function(replica(piece), part).backward()
    found = [[parameter.grad for parameter in replica.parameters()] for replica in replicas[: len(pieces)]]
    return [sum(parts) / len(pieces) for parts in zip(*found)]


# %% gradients: right for a mean over samples only
def gradients(replicas, pieces, target, loss_function):
    targets = target.tensor_split(len(pieces))
    for replica, piece, part in zip(replicas, pieces, targets):
        (loss_function(replica(piece), part) * len(piece) / len(target)).backward()
    found = [[parameter.grad for parameter in replica.parameters()] for replica in replicas[: len(pieces)]]
    return [sum(parts) for parts in zip(*found)]


# %% gradients: the average over the replicas
def gradients(replicas, pieces, target, loss_function):
    output = torch.cat([replica(piece) for replica, piece in zip(replicas, pieces)])
    loss_function(output, target).backward()
    found = [[parameter.grad for parameter in replica.parameters()] for replica in replicas[: len(pieces)]]
    return [torch.stack(parts).mean(dim=0) for parts in zip(*found)]


# %% gradients: what the first replica found, without the others
def gradients(replicas, pieces, target, loss_function):
    output = torch.cat([replica(piece) for replica, piece in zip(replicas, pieces)])
    loss_function(output, target).backward()
    return [parameter.grad for parameter in replicas[0].parameters()]


# %% gradients: NoneType
def gradients(replicas, pieces, target, loss_function):
    output = torch.cat([replica(piece) for replica, piece in zip(replicas, pieces)])
    loss_function(output, target).backward()
    found = [[parameter.grad for parameter in replica.parameters()] for replica in replicas]
    return [sum(parts) for parts in zip(*found)]


# %% messages: they wait for each other
def forward(model, batch, lengths):
    rank = dist.get_rank()
    if rank > 0:
        piece = torch.empty(lengths[rank], model.in_features)
        dist.recv(piece, 0)
        dist.send(model(piece), 0)
        return None
    pieces, outputs = batch.split(lengths), []
    for other in range(len(lengths)):
        output = torch.empty(lengths[other], model.out_features)
        if other == 0:
            output = model(pieces[0])
        else:
            dist.recv(output, other)  # of what it has not been sent yet
            dist.send(pieces[other], other)
        outputs.append(output)
    return torch.cat(outputs)


# %% messages: the others should have their share
def forward(model, batch, lengths):
    return model(batch) if dist.get_rank() == 0 else None


# %% messages: without those of the others
def forward(model, batch, lengths):
    rank = dist.get_rank()
    if rank > 0:
        piece = torch.empty(lengths[rank], model.in_features)
        dist.recv(piece, 0)
        model(piece)
        return None
    pieces = batch.split(lengths)
    for other in range(1, len(lengths)):
        dist.send(pieces[other], other)
    return model(pieces[0])


# %% messages: only rank 0 is to return them
def forward(model, batch, lengths):
    rank = dist.get_rank()
    everything = batch if rank == 0 else torch.empty(sum(lengths), model.in_features)
    dist.broadcast(everything, 0)
    own = model(everything.split(lengths)[rank]).detach()
    outputs = [torch.empty(length, model.out_features) for length in lengths]
    for other, output in enumerate(outputs):
        output.copy_(own) if other == rank else None
        dist.broadcast(output, other)
    return torch.cat(outputs)
