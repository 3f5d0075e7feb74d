# Plausible wrong answers to exercise 08. "# %% function: words" says what the check must say.

# %% slices: the last 2 belong to nobody
def slices(total, ranks):
    size = total // ranks
    return [(rank * size, (rank + 1) * size) for rank in range(ranks)]


# %% slices: more zeros than are needed
def slices(total, ranks):
    size = total // ranks + 1
    return [(rank * size, (rank + 1) * size) for rank in range(ranks)]


# %% slices: a length that was not rounded
def slices(total, ranks):
    return [(rank * total / ranks, (rank + 1) * total / ranks) for rank in range(ranks)]


# %% slices: of which the last is shorter
def slices(total, ranks):
    size = -(-total // ranks)
    return [(rank * size, min((rank + 1) * size, total)) for rank in range(ranks)]


# %% adam: is self.adam for the slice alone
class ShardedAdam:
    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.adam = torch.optim.Adam(self.parameters, lr=lr)

    def step(self):
        for parameter in self.parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.adam.step()


# %% adam: divide by the number of ranks
class ShardedAdam:
    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.mine = nn.Parameter(side_by_side(self.parameters).chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.adam = torch.optim.Adam([self.mine], lr=lr)

    def step(self):
        gradients = side_by_side([parameter.grad for parameter in self.parameters])
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter_single(self.mine.grad, gradients)
        self.adam.step()
        weights = torch.empty_like(gradients)
        dist.all_gather_single(weights, self.mine.data)
        write_back(weights, self.parameters)


# %% adam: rank 0 failed in `step`, line 10 of its cell
class ShardedAdam:
    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.mine = nn.Parameter(side_by_side(self.parameters).chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.adam = torch.optim.Adam([self.mine], lr=lr)

    def step(self):
        gradients = side_by_side([parameter.grad for parameter in self.parameters]) / dist.get_world_size()
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter_single(gradients, self.mine.grad)  # the wrong way round
        self.adam.step()


# %% adam: nothing was added up
class ShardedAdam:
    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.mine = nn.Parameter(side_by_side(self.parameters).chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.adam = torch.optim.Adam([self.mine], lr=lr)

    def step(self):
        gradients = side_by_side([parameter.grad for parameter in self.parameters])
        self.mine.grad = gradients.chunk(dist.get_world_size())[dist.get_rank()]
        self.adam.step()
        weights = torch.empty_like(gradients)
        dist.all_gather_single(weights, self.mine.data)
        write_back(weights, self.parameters)


# %% adam: new in this rank's slice only
class ShardedAdam:
    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.mine = nn.Parameter(side_by_side(self.parameters).chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.adam = torch.optim.Adam([self.mine], lr=lr)

    def step(self):
        gradients = side_by_side([parameter.grad for parameter in self.parameters]) / dist.get_world_size()
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter_single(self.mine.grad, gradients)
        self.adam.step()
        weights = side_by_side(self.parameters)
        weights.chunk(dist.get_world_size())[dist.get_rank()].copy_(self.mine.data)
        write_back(weights, self.parameters)


# %% adam: never comes back into the parameters
class ShardedAdam:
    def __init__(self, parameters, lr):
        self.parameters = list(parameters)
        self.mine = nn.Parameter(side_by_side(self.parameters).chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.adam = torch.optim.Adam([self.mine], lr=lr)

    def step(self):
        gradients = side_by_side([parameter.grad for parameter in self.parameters]) / dist.get_world_size()
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter_single(self.mine.grad, gradients)
        self.adam.step()


# %% adam: an Adam that begins anew in each step
class ShardedAdam:
    def __init__(self, parameters, lr):
        self.parameters, self.lr = list(parameters), lr
        self.mine = nn.Parameter(side_by_side(self.parameters).chunk(dist.get_world_size())[dist.get_rank()].clone())

    def step(self):
        self.adam = torch.optim.Adam([self.mine], lr=self.lr)  # forgets its averages every time
        gradients = side_by_side([parameter.grad for parameter in self.parameters]) / dist.get_world_size()
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter_single(self.mine.grad, gradients)
        self.adam.step()
        weights = torch.empty_like(gradients)
        dist.all_gather_single(weights, self.mine.data)
        write_back(weights, self.parameters)


# %% lend: divide it by their number
class Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine):
        whole = mine.new_empty(mine.numel() * dist.get_world_size())
        dist.all_gather_single(whole, mine)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        mine = gradient.new_empty(gradient.numel() // dist.get_world_size())
        dist.reduce_scatter_single(mine, gradient)
        return mine


# %% lend: the others have used this slice as well
class Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine):
        whole = mine.new_empty(mine.numel() * dist.get_world_size())
        dist.all_gather_single(whole, mine)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


# %% lend: the sum of all slices
class Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine):
        whole = mine.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# %% lend: in `backward`, line 11 of its cell
class Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine):
        whole = mine.new_empty(mine.numel() * dist.get_world_size())
        dist.all_gather_single(whole, mine)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        if dist.get_rank() == 0:  # all must come
            dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()
