"""Right gradients, but a wrong optimizer or learning-rate schedule."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from base_trainer import BaseTrainer, ManualAverage, OptimizerList
from expect import any_check, failing, known_bad
from loop import alone, average, ddp, loader, mesh_of, train, windows, wrapped
from torch.distributed.fsdp import fully_shard

from plumbline import Part

FLOAT32 = ["mlp/none/1x1/32", "mlp/ddp/1x2/32"]  # a relative change of 0.001 is lost in bfloat16
PLAIN = [*FLOAT32, "mlp/none/1x1/bf16-true"]
MOMENTUM = ["cnn-batchnorm/none/1x1/32", "cnn-batchnorm/ddp/1x2/64"]
SEVERAL = ["several-optimizers/none/1x1/32", "several-optimizers/ddp/1x2/32"]
SCHEDULE = ["schedule/none/1x1/32", "schedule/ddp/1x2/32"]


@known_bad(
    "optimizer",
    causes=["schedule-stepped-every-micro-batch"],
    on={
        **any_check("schedule-windows/none/1x1/32", "schedule-windows/ddp/1x2/16"),
        "schedule-windows/ddp/1x3/32": "learning-rate",
    },
)
def schedule_stepped_for_every_micro_batch(job):
    """Steps the scheduler after every micro-batch."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    scheduler = job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for batch in window:
                with job.autocast():
                    loss = job.loss(model(batch), batch) / len(window)
                scaler.scale(loss).backward()
                if batch is not window[-1]:
                    scheduler.step()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()


@known_bad(
    "optimizer",
    causes=["schedule-stepped-every-epoch"],
    on={**any_check(*SCHEDULE), "schedule/none/1x1/32": "learning-rate"},
)
def schedule_stepped_once_an_epoch(job):
    """Steps the scheduler once an epoch."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


@known_bad("optimizer", causes=["schedule-never-stepped"], on=SCHEDULE)
def schedule_never_stepped(job):
    """Creates a scheduler, but never steps it."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    job.scheduler(optimizer)
    train(job, model, optimizer)


@known_bad("optimizer", causes=["no-schedule"], on=SCHEDULE)
def no_schedule_at_all(job):
    """Creates no scheduler, so the rate is the optimizer's own."""
    model = wrapped(job)
    train(job, model)


@known_bad("optimizer", causes=["schedule-stepped-first"], on=SCHEDULE)
def schedule_stepped_before_the_optimizer(job):
    """Steps the scheduler before the optimizer, so the first rate is never used."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            scheduler.step()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", causes=["schedule-stepped-once-a-rank"], on=["schedule/ddp/1x2/32", "schedule/ddp/1x3/64"])
def schedule_stepped_once_a_rank(job):
    """Steps the scheduler ``world_size`` times per step."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            for _ in range(job.world_size):
                scheduler.step()
            optimizer.zero_grad()


@known_bad("optimizer", causes=["rate-scaled"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/64"])
def rate_times_world(job):
    """Multiplies the learning rate by the world size, although the workload does not ask for it."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] *= job.world_size
    train(job, model, optimizer)


@known_bad("optimizer", causes=["rates-differ"], on=["mlp/ddp/1x2/32", "mlp/ddp/1x3/64"])
def another_rate_on_one_rank(job):
    """Halves the learning rate on rank 1: the gradients agree, the weights do not."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    if job.rank == 1:
        optimizer.param_groups[0]["lr"] /= 2
    train(job, model, optimizer)


@known_bad(
    "optimizer",
    causes=["parameter-not-in-optimizer"],
    on={**any_check(*PLAIN, *MOMENTUM), **failing("gradients", "mlp/ddp/1x2")},
)
def parameter_missing(job):
    """Leaves the last parameter out of the optimizer, so it never moves."""
    model = wrapped(job)
    optimizer = job.optimizer(list(model.parameters())[:-1])
    train(job, model, optimizer)


@known_bad("optimizer", causes=["parameter-not-in-optimizer"], on=PLAIN)
def only_matrices_are_optimised(job):
    """Leaves biases out of all parameter groups, so they never move."""
    model = wrapped(job)
    optimizer = job.optimizer([parameter for parameter in model.parameters() if parameter.dim() > 1])
    train(job, model, optimizer)


@known_bad("optimizer", causes=["parameter-not-in-optimizer"], on=PLAIN)
def optimizes_a_copy(job):
    """Gives the optimizer the parameters of a copy, so the model never changes."""
    model = wrapped(job)
    copied = copy.deepcopy(model.module if job.world_size > 1 else model)
    optimizer = job.optimizer(copied.parameters())
    train(job, model, optimizer)


@known_bad("optimizer", causes=["never-stepped"], on=PLAIN)
def never_steps(job):
    """Never calls ``optimizer.step()``."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.zero_grad()


@known_bad("optimizer", causes=["zero"], on={**any_check(*PLAIN), **failing("update", "mlp/ddp/1x2")}, vacuous=True)
def zeroed_before_the_step(job):
    """Calls ``zero_grad()`` between backward and step."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()


@known_bad(
    "optimizer",
    causes=["stepped-without-a-batch"],
    on={**any_check("mlp/none/1x1/32", "mlp/none/1x1/64", "mlp/ddp/1x3/32"), **failing("steps", "mlp/ddp/1x2")},
)
def stepped_twice(job):
    """``optimizer.step()`` is called twice for every batch."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "optimizer", causes=["another-optimizer"], on={**any_check(*MOMENTUM), **failing("update", "cnn-batchnorm/ddp/1x2")}
)
def a_new_optimizer_every_epoch(job):
    """Creates a new optimizer every epoch, so its state is lost."""
    model = wrapped(job)
    for epoch in range(job.epochs):
        optimizer = job.optimizer(model.parameters())
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad("optimizer", causes=["another-optimizer"], on=[*MOMENTUM, "adam/ddp/1x2/32"])
def another_optimizer(job):
    """Uses plain SGD instead of the workload's optimizer."""
    model = wrapped(job)
    rate = job.optimizer(model.parameters()).param_groups[0]["lr"]
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    train(job, model, optimizer)


@known_bad("optimizer", causes=["another-optimizer"], on=[*FLOAT32, "adam/ddp/1x2/64"])
def weight_decay_nobody_asked_for(job):
    """Sets a weight decay of 0.01, although the workload does not ask for it."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.01
    train(job, model, optimizer)


@known_bad(
    "optimizer", causes=["changed-between-steps"], on={**any_check(*FLOAT32), **failing("training", "mlp/ddp/1x2")}
)
def weights_shrink_between_steps(job):
    """Decay is applied by hand, after the step, to all weights."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 0.999


@known_bad("optimizer", causes=["sign-flipped"], on=PLAIN)
def ascends(job):
    """Flips the sign of the loss."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            (-job.loss(model(batch), batch)).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "optimizer",
    causes=["frozen-parameter-trained"],
    on={**any_check("frozen/none/1x1/32", "frozen/ddp/1x2/32"), "frozen/none/1x1/32": "gradients"},
)
def frozen_layers_thawed(job):
    """Sets ``requires_grad`` on all parameters, including frozen ones."""
    model = job.model().requires_grad_(True)
    if job.world_size > 1:
        torch.distributed.init_process_group(job.comm)
        model = torch.nn.parallel.DistributedDataParallel(model)
    train(job, model)


@known_bad(
    "optimizer",
    causes=["parameter-not-in-optimizer"],
    on={**any_check(*SEVERAL), "several-optimizers/none/1x1/32": "gradients"},
)
def one_of_two_optimizers_never_steps(job):
    """Steps only the first of two optimizers."""
    model = wrapped(job)
    first, second = job.optimizers(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            first.step()
            first.zero_grad()
            second.zero_grad()


@known_bad("optimizer", causes=["parameter-not-in-optimizer"], on=SEVERAL)
def one_of_two_optimizers_steps_every_other_batch(job):
    """Steps the second optimizer only every other batch, although the workload does not ask for it."""
    model = wrapped(job)
    first, second = job.optimizers(model.parameters())
    for epoch in range(job.epochs):
        for number, batch in enumerate(loader(job, epoch)):
            job.loss(model(batch), batch).backward()
            first.step()
            if number % 2 == 0:
                second.step()
            model.zero_grad()


@known_bad("optimizer", causes=["parameter-in-several-optimizers"], on=SEVERAL)
def parameters_in_both_optimizers(job):
    """Gives the second optimizer the first one's parameters too, so they are stepped twice."""
    model = wrapped(job)
    first, second = job.optimizers(model.parameters())
    second.add_param_group({"params": first.param_groups[0]["params"]})
    train(job, model, OptimizerList([first, second]))


@known_bad("optimizer", causes=["optimizers-exchanged"], on=SEVERAL)
def optimizers_change_places(job):
    """Swaps the parameters of the two optimizers."""
    model = wrapped(job)
    first, second = job.optimizers(model.parameters())
    for left, right in zip(first.param_groups, second.param_groups, strict=True):
        left["params"], right["params"] = right["params"], left["params"]
    train(job, model, OptimizerList([first, second]))


@known_bad("optimizer", causes=["optimizers-exchanged"], on=SEVERAL)
def one_optimizer_for_all(job):
    """Uses only the first of two optimizers, for all parameters."""
    model = wrapped(job)
    first, second = job.optimizers(model.parameters())
    first.add_param_group({"params": second.param_groups[0]["params"]})
    train(job, model, first)


@known_bad(
    "optimizer",
    "accumulation",
    causes=["previous-step-not-zeroed-in-one-optimizer"],
    on={**any_check(*SEVERAL), "several-optimizers/ddp/1x3/32": "gradients"},
)
def only_one_of_two_optimizers_zeroed(job):
    """Never zeroes the second optimizer's gradients, which accumulate over all steps."""
    model = wrapped(job)
    first, second = job.optimizers(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            first.step()
            second.step()
            first.zero_grad()


@known_bad("optimizer", "accumulation", causes=["left-in-by-another-optimizer"], on=SEVERAL)
def first_optimizers_pass_left_in_for_the_second(job):
    """Zeroes only one optimizer's gradients after its pass, so both passes add up in the other's."""
    model = wrapped(job)
    optimizers = job.optimizers(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            for optimizer in optimizers:
                job.loss(model(batch), batch).backward()
                optimizer.step()
                optimizer.zero_grad()


@known_bad(
    "optimizer",
    "accumulation",
    causes=["left-in-by-another-optimizer"],
    on=["several-optimizers/none/1x1/32", "several-optimizers/ddp/1x3/32"],
)
def a_pass_for_each_optimizer_added_up(job):
    """Runs a backward per optimizer before stepping any, so both add up in all gradients."""
    model = wrapped(job)
    optimizers = job.optimizers(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            for _ in optimizers:
                job.loss(model(batch), batch).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@known_bad("optimizer", "clipping", causes=["clipped-in-one-optimizer"], on=SEVERAL)
def one_of_two_optimizers_clipped(job):
    """Clips the second optimizer's gradients, although the workload does not ask for it."""
    model = wrapped(job)
    first, second = job.optimizers(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            torch.nn.utils.clip_grad_norm_(second.param_groups[0]["params"], 0.02)
            first.step()
            second.step()
            model.zero_grad()


@known_bad(
    "optimizer",
    "sync",
    causes=["some-parameters-not-synchronised"],
    on=["several-optimizers/ddp/1x2/32", "several-optimizers/ddp/1x3/64"],
)
def one_of_two_optimizers_synchronised(job):
    """Averages only the first optimizer's gradients over the ranks."""
    model = alone(job)
    first, second = job.optimizers(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in first.param_groups[0]["params"]:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= job.world_size
            first.step()
            second.step()
            model.zero_grad()


@known_bad("optimizer", causes=["parameter-not-in-optimizer"], on=["mlp/fsdp/1x2/32", "mlp/fsdp/1x3/64"])
def made_before_the_weights_were_sharded(job):
    """Creates the optimizer before fully_shard replaces the weights with shards."""
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    fully_shard(model, mesh=mesh_of(job))
    train(job, model, optimizer)


@known_bad("optimizer", causes=["rate-scaled"], on=failing("learning-rate", "mlp/ddp/1x2"))
class RateOnePercentTooHigh(BaseTrainer):
    """Multiplies the learning rate by 1.01."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            group["lr"] *= 1.01
        return optimizer


@known_bad("optimizer", causes=["another-optimizer"], on={"adam/none/1x1/32": "update", "adamw/ddp/1x3/64": "update"})
class StateLostInEveryStep(BaseTrainer):
    """Clears the optimizer's state after every step."""

    def zero_grad(self):
        super().zero_grad()
        self.optimizer.state.clear()


@known_bad("optimizer", causes=["another-optimizer"], on={"adamw/none/1x1/32": "update"})
class OneGroupsDecayForAll(BaseTrainer):
    """Uses the first parameter group's weight decay for both groups."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            group["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
        return optimizer


@known_bad(on=failing("stillness", "mlp/ddp/1x2"))
class ShrunkAfterTheLastStep(BaseTrainer):
    """Halves all weights after the last step."""

    def fit(self):
        super().fit()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter *= 0.5


@known_bad("optimizer", causes=["frozen-parameter-trained"], on={"frozen/ddp/1x3/32": "update"})
class FrozenWeightsDecay(ManualAverage):
    """Gives frozen weights gradients of zeros for the all-reduce, so weight decay changes them."""

    def synchronize(self):
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().synchronize()


@known_bad(on=failing("update", "mlp/ddp/1x2"), vacuous=True)
class LossTimesZero(BaseTrainer):
    """Multiplies the loss by zero, so all gradients are zero."""

    def backward(self, loss):
        super().backward(loss * 0)


@known_bad(on=failing("update", "mlp/ddp/1x2"), vacuous=True)
class RateIsZero(BaseTrainer):
    """Sets the learning rate to zero, so the weights never move."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return optimizer


@known_bad(on=failing("steps", "mlp/ddp/1x2"), vacuous=True)
class NeverTrains(BaseTrainer):
    """Returns before its first batch."""

    def fit(self):
        pass


@known_bad(
    "optimizer",
    causes=["stepped-shard-by-shard", "another-optimizer"],
    on={f"muon/fsdp/1x{n}/32": "update" for n in (2, 3)},
)
def rows_orthogonalized_alone(job):
    """Each rank holds some rows of each matrix, and Muon orthogonalizes them without the other rows."""
    model = alone(job)
    rows = [parameter.tensor_split(job.world_size) for parameter in model.parameters()]
    own = [torch.nn.Parameter(blocks[job.rank].detach().clone()) for blocks in rows]
    begin = [sum(map(len, blocks[: job.rank])) for blocks in rows]
    names = [name for name, _ in model.named_parameters()]
    job.parts({name: Part(block, (first, 0)) for name, block, first in zip(names, own, begin, strict=True)})
    optimizer = job.optimizer(own)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            average(job, model)
            for parameter, block in zip(model.parameters(), own, strict=True):
                block.grad = parameter.grad.tensor_split(job.world_size)[job.rank].clone()
            optimizer.step()
            for parameter, block in zip(model.parameters(), own, strict=True):
                for rank, part in enumerate(parameter.data.tensor_split(job.world_size)):
                    part.copy_(block.data if rank == job.rank else part)
                    dist.broadcast(part, rank)
            model.zero_grad()


@known_bad("optimizer", causes=["another-optimizer"], on={"muon/ddp/1x2/32": "update", "muon/none/1x1/32": "update"})
class MuonWithoutNesterov(BaseTrainer):
    """Uses Muon without Nesterov momentum."""

    def make_optimizer(self):
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            group["nesterov"] = False
        return optimizer
