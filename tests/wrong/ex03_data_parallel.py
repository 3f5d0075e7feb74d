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
