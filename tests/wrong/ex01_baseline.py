# Plausible wrong answers to exercise 01. "# %% function: words" says what the check must say.

# %% accumulate: the mean of the means
def accumulate(model, loss_function, batches, optimizer):
    optimizer.zero_grad()
    for x, y in batches:
        (loss_function(model(x), y) / len(batches)).backward()
    optimizer.step()


# %% accumulate: zero_grad belongs before the loop
def accumulate(model, loss_function, batches, optimizer):
    samples = sum(len(x) for x, _ in batches)
    for x, y in batches:
        optimizer.zero_grad()
        (loss_function(model(x), y) * len(x) / samples).backward()
    optimizer.step()


# %% accumulate: optimizer.step() was called 3 times
def accumulate(model, loss_function, batches, optimizer):
    samples = sum(len(x) for x, _ in batches)
    optimizer.zero_grad()
    for x, y in batches:
        (loss_function(model(x), y) * len(x) / samples).backward()
        optimizer.step()


# %% accumulate: gradients of an earlier step are still there
def accumulate(model, loss_function, batches, optimizer):
    samples = sum(len(x) for x, _ in batches)
    for x, y in batches:
        (loss_function(model(x), y) * len(x) / samples).backward()
    optimizer.step()


# %% accumulate: before the next one, its backward
def accumulate(model, loss_function, batches, optimizer):
    samples = sum(len(x) for x, _ in batches)
    optimizer.zero_grad()
    sum(loss_function(model(x), y) * len(x) / samples for x, y in batches).backward()
    optimizer.step()


# %% cost: right but for the biases
def conv_cost(inputs, outputs, *, kernel, size, stride=1):
    weights = inputs * outputs * kernel * kernel
    return weights, weights * -(-size[0] // stride) * -(-size[1] // stride)


# %% cost: with a stride the output has fewer
def conv_cost(inputs, outputs, *, kernel, size, stride=1):
    weights = inputs * outputs * kernel * kernel
    return weights + outputs, weights * size[0] * size[1]


# %% cost: rounded down
def conv_cost(inputs, outputs, *, kernel, size, stride=1):
    weights = inputs * outputs * kernel * kernel
    return weights + outputs, weights * (size[0] // stride) * (size[1] // stride)


# %% kept: the last output with it
def kept_bytes(channels, *, size, batch):
    return 4 * batch * size[0] * size[1] * sum(channels)


# %% kept: counted twice: it is one tensor
def kept_bytes(channels, *, size, batch):
    return 4 * batch * size[0] * size[1] * (channels[0] + 2 * sum(channels[1:-1]))
