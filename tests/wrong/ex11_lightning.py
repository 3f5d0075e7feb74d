# Plausible wrong answers to exercise 11. "# %% task: words" says what the check must say.

# %% module: nothing has been learned
class Classifier(lightning.LightningModule):
    def __init__(self, net, lr, warmup):
        super().__init__()
        self.net, self.lr, self.warmup = net, lr, warmup

    def training_step(self, batch, number):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = LambdaLR(optimizer, lambda done: min(1, (done + 1) / self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# %% module: been through backward already, which is the Trainer's part
class Classifier(lightning.LightningModule):
    def __init__(self, net, lr, warmup):
        super().__init__()
        self.net, self.lr, self.warmup = net, lr, warmup

    def training_step(self, batch, number):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = LambdaLR(optimizer, lambda done: min(1, (done + 1) / self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# %% module: moves on once an epoch
class Classifier(lightning.LightningModule):
    def __init__(self, net, lr, warmup):
        super().__init__()
        self.net, self.lr, self.warmup = net, lr, warmup

    def training_step(self, batch, number):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = LambdaLR(optimizer, lambda done: min(1, (done + 1) / self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": schedule}


# %% module: does the Trainer get the schedule
class Classifier(lightning.LightningModule):
    def __init__(self, net, lr, warmup):
        super().__init__()
        self.net, self.lr, self.warmup = net, lr, warmup

    def training_step(self, batch, number):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        LambdaLR(optimizer, lambda done: min(1, (done + 1) / self.warmup))
        return optimizer


# %% module: DDP has averaged the gradients already
class Classifier(lightning.LightningModule):
    def __init__(self, net, lr, warmup):
        super().__init__()
        self.net, self.lr, self.warmup = net, lr, warmup

    def training_step(self, batch, number):
        x, y = batch
        return F.cross_entropy(self.net(x), y) / self.trainer.world_size

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = LambdaLR(optimizer, lambda done: min(1, (done + 1) / self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# %% judge: each rank's own accuracy
class Judge(lightning.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def validation_step(self, batch, number):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(dim=1) == y).float().mean())


# %% judge: a count that it has rounded down
class Judge(lightning.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def validation_step(self, batch, number):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(dim=1) == y).float().mean(), sync_dist=True)


# %% judge: a rank with few samples counts as much
class Judge(lightning.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def on_validation_epoch_start(self):
        self.sums = torch.zeros(2)

    def validation_step(self, batch, number):
        x, y = batch
        self.sums += torch.tensor([(self.net(x).argmax(dim=1) == y).sum(), len(y)])

    def on_validation_epoch_end(self):
        self.log("accuracy", self.sums[0] / self.sums[1], sync_dist=True)


# %% loader: does every rank take others
def make_loader(samples, batch, rank, ranks):
    return DataLoader(samples, batch_size=batch // ranks, shuffle=True, drop_last=True)


# %% loader: `batch` is that of all ranks together
def make_loader(samples, batch, rank, ranks):
    sampler = DistributedSampler(samples, num_replicas=ranks, rank=rank, shuffle=True, drop_last=True)
    return DataLoader(samples, batch_size=batch, sampler=sampler, drop_last=True)


# %% loader: who fills up the ranks
def make_loader(samples, batch, rank, ranks):
    sampler = DistributedSampler(samples, num_replicas=ranks, rank=rank, shuffle=True)  # repeats some
    return DataLoader(samples, batch_size=batch // ranks, sampler=sampler, drop_last=True)


# %% loader: had returned already
def make_loader(samples, batch, rank, ranks):
    mine = Subset(samples, range(rank, len(samples), ranks))  # 13 and 12: one step more for rank 0
    return DataLoader(mine, batch_size=batch // ranks, shuffle=True)


# %% loader: who keeps the rest
def make_loader(samples, batch, rank, ranks):
    sampler = DistributedSampler(samples, num_replicas=ranks, rank=rank, shuffle=True, drop_last=True)
    return DataLoader(samples, batch_size=batch // ranks, sampler=sampler)


# %% loader: the same batches: shuffle
def make_loader(samples, batch, rank, ranks):
    sampler = DistributedSampler(samples, num_replicas=ranks, rank=rank, shuffle=False, drop_last=True)
    return DataLoader(samples, batch_size=batch // ranks, sampler=sampler, drop_last=True)
