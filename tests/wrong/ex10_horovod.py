# Plausible wrong answers to exercise 10. "# %% function: words" says what the check must say.

# %% broadcast: buffers are no parameters
def broadcast_state(model, optimizer):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    state = [optimizer.state_dict()]
    dist.broadcast_object_list(state, src=0)
    optimizer.load_state_dict(state[0])


# %% broadcast: the optimizer has a state_dict(), too
def broadcast_state(model, optimizer):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


# %% broadcast: in `broadcast_state`, line 6 of its cell
def broadcast_state(model, optimizer):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    for state in optimizer.state.values():  # of which rank 1 has none
        for tensor in state.values():
            dist.broadcast(tensor, src=0)


# %% broadcast: has made a step with zeros, to have something to send
def broadcast_state(model, optimizer):
    if not optimizer.state:  # as Horovod does
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    for state in optimizer.state.values():
        for tensor in state.values():
            dist.broadcast(tensor, src=0)
    rate = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.double)
    dist.broadcast(rate, src=0)
    optimizer.param_groups[0]["lr"] = rate.item()


# %% broadcast: it is in the optimizer's state_dict()
def broadcast_state(model, optimizer):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    state = [optimizer.state_dict()["state"]]
    dist.broadcast_object_list(state, src=0)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state[0]})


# %% broadcast: each rank's own: nothing has come
def broadcast_state(model, optimizer):
    state = [model.state_dict(), optimizer.state_dict()]
    dist.broadcast_object_list(state, src=0)


# %% optimizer: divide by the number of ranks
class DistributedOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.synchronized = False

    def zero_grad(self):
        self.optimizer.zero_grad()

    def synchronize(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        self.synchronized = True

    def step(self):
        if not self.synchronized:
            self.synchronize()
        self.optimizer.step()
        self.synchronized = False


# %% optimizer: averaged in the first step only
class DistributedOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.synchronized = False

    def zero_grad(self):
        self.optimizer.zero_grad()

    def synchronize(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.synchronized = True

    def step(self):
        if not self.synchronized:
            self.synchronize()
        self.optimizer.step()


# %% optimizer: step sends again what synchronize has sent
class DistributedOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def synchronize(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def step(self):
        self.synchronize()
        self.optimizer.step()


# %% optimizer: nothing is averaged
class DistributedOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def synchronize(self):
        pass

    def step(self):
        self.optimizer.step()


# %% optimizer: in `synchronize`, line 12 of its cell
class DistributedOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def synchronize(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()

    def step(self):
        self.synchronize()
        self.optimizer.step()


# %% optimizer: an optimizer that has lost its momentum
class DistributedOptimizer:
    def __init__(self, optimizer):
        self.optimizer = torch.optim.SGD(optimizer.param_groups, lr=0.1, momentum=0.9)
        self.synchronized = False

    def zero_grad(self):
        self.optimizer.zero_grad()

    def synchronize(self):
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.synchronized = True

    def step(self):
        if not self.synchronized:
            self.synchronize()
        self.optimizer.step()
        self.synchronized = False


# %% negotiate: each rank's own order
def negotiate(ready):
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, ready)
    return [name for name in ready if all(name in names for names in everywhere)]


# %% negotiate: what is ready somewhere
def negotiate(ready):
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, ready)
    return list(dict.fromkeys(name for names in everywhere for name in names))


# %% negotiate: was left alone in `negotiate`, line 5 of its cell
def negotiate(ready):
    if not ready:
        return []
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, ready)
    return [name for name in everywhere[0] if all(name in names for names in everywhere)]


# %% negotiate: the order of the alphabet
def negotiate(ready):
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, ready)
    return sorted(set.intersection(*map(set, everywhere)))
