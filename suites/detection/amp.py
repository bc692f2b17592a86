"""Mixed precision: the loss scale, overflows, skipped steps, and the precision itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from base_trainer import BaseTrainer, ManualAverage
from expect import any_check, failing, known_bad
from loop import alone, average, ddp, loader, own_scaler, train_scaled, wrapped

HALF = ["mlp/ddp/1x2/16", "mlp/none/1x1/16", "lm-tokens/ddp/1x3/16"]
OVERFLOW = ["overflow/ddp/1x2/16", "overflow/ddp/1x3/16"]


@known_bad("amp", causes=["loss-scale-left-in"], on={**any_check(*HALF), "mlp/ddp/1x2/16": "gradients"})
def steps_on_scaled_gradients(job):
    """Calls ``optimizer.step()`` instead of ``scaler.step(optimizer)``, so gradients are never unscaled."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            optimizer.step()
            scaler.update(2.0**16)
            optimizer.zero_grad()


@known_bad(
    "amp",
    causes=["unscaled-by-a-lowered-scale"],
    on={"several-optimizers/none/1x1/16": "gradients", "several-optimizers/ddp/1x2/16": "gradients"},
)
def scale_lowered_between_two_optimizers(job):
    """Updates the scaler after each optimizer: if one overflows, the other is unscaled by the lowered scale."""
    model = wrapped(job)
    optimizers, scaler = job.optimizers(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**19)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            for optimizer in reversed(optimizers):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()


@known_bad("amp", causes=["loss-scale-left-in"], on=HALF)
def loss_scaled_twice(job):
    """Scales the loss twice, but unscales gradients once."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**7)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(scaler.scale(loss)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_bad("amp", causes=["unscaled-twice"], on=HALF)
def unscaled_twice(job):
    """Divides gradients by the loss scale by hand before the scaler does so again."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()

    def unscale():
        for parameter in model.parameters():
            parameter.grad /= scaler.get_scale()

    train_scaled(job, model, optimizer, scaler, after_backward=unscale)


@known_bad("amp", causes=["overflow-decided-alone"], on={**any_check(*OVERFLOW), "overflow/ddp/1x3/16": "ranks-agree"})
def overflow_decided_on_each_rank_alone(job):
    """Each rank checks only its own gradients for overflow: ranks without one step with the average."""
    model = alone(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()

    def unscale_and_average():
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0, 0, 0)
        average(job, model)

    train_scaled(job, model, optimizer, scaler, after_backward=unscale_and_average)


@known_bad("amp", causes=["overflow-decided-alone"], on=OVERFLOW)
def infinities_spread_to_ranks_that_step(job):
    """Each rank checks only its own gradients for overflow, then averages: the others step with infinities."""
    model = alone(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()

    def unscale_and_average():
        scaler.unscale_(optimizer)
        average(job, model)

    train_scaled(job, model, optimizer, scaler, after_backward=unscale_and_average)


@known_bad(
    "amp",
    causes=["not-finite"],
    on={**any_check(*OVERFLOW, "overflow/none/1x1/16"), "overflow/ddp/1x3/16": "gradients"},
)
def infinities_ignored(job):
    """Steps even if gradients have overflowed."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    scale = 2.0**16
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            (loss * scale).backward()
            for parameter in model.parameters():
                parameter.grad /= scale
            optimizer.step()
            optimizer.zero_grad()


@known_bad("amp", causes=["infinities-zeroed"], on=[*OVERFLOW, "overflow/none/1x1/16"])
def infinities_set_to_zero(job):
    """Replaces infinite gradients with zeros, and steps instead of skipping."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    scale = 2.0**16
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            (loss * scale).backward()
            for parameter in model.parameters():
                parameter.grad = (parameter.grad / scale).nan_to_num(0, 0, 0)
            optimizer.step()
            optimizer.zero_grad()


@known_bad("amp", causes=["moved-when-skipped"], on=[*OVERFLOW, "overflow/none/1x1/16"])
def weights_decay_when_the_step_is_skipped(job):
    """Decays the weights by hand whenever the scaler skips a step."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter *= 0.99
            optimizer.zero_grad()


@known_bad(
    "amp",
    causes=["skipped-without-overflow"],
    on={**any_check(*OVERFLOW, "overflow/none/1x1/16"), "overflow/ddp/1x2/16": "skipped-steps"},
)
def overflow_left_in_the_gradients(job):
    """Zeroes gradients only after a taken step: once they overflow, they stay infinite and every step is skipped."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() >= before:
                optimizer.zero_grad()


@known_bad("amp", causes=["scale-not-lowered"], on=OVERFLOW)
def scale_never_lowered(job):
    """Never calls ``scaler.update()``, so the scale that overflowed overflows again."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler._per_optimizer_states.clear()  # the part of update() that allows the next step
            optimizer.zero_grad()


@known_bad(
    "amp",
    causes=["schedule-steps-when-skipped"],
    on={
        **any_check("overflow-schedule/ddp/1x2/16", "overflow-schedule/none/1x1/16"),
        "overflow-schedule/ddp/1x3/16": "learning-rate",
    },
)
def schedule_goes_on_when_the_step_is_skipped(job):
    """Steps the scheduler after every attempt, even if the scaler skipped the step."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    scheduler = job.scheduler(optimizer)
    train_scaled(job, model, optimizer, scaler, after_update=scheduler.step)


@known_bad("amp", causes=["scales-differ"], on=["mlp/ddp/1x2/16", "mlp/ddp/1x3/16"])
def another_scale_on_each_rank(job):
    """Uses a different loss scale on each rank, but averages the scaled gradients."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + job.rank))
    train_scaled(job, model, optimizer, scaler)


@known_bad(
    "amp",
    causes=["skipped-for-nothing"],
    on={**any_check("mlp/ddp/1x2/16", "mlp/none/1x1/16"), "mlp/ddp/1x2/16": "skipped-steps"},
)
def finite_steps_skipped(job):
    """Skips the second step although its gradients are finite."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    steps = 0
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if steps == 1:
                for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                    found.fill_(1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            steps += 1


@known_bad(
    "amp",
    causes=["scale-not-lowered"],
    on={**any_check("overflow/none/1x1/16"), "overflow/ddp/1x2/16": "skipped-steps"},
)
def own_scale_never_lowered(job):
    """Never lowers a scale that overflows at every step, like DeepSpeed 0.19.8 with ZeRO and torch_autocast."""
    own_scaler(job, first=2.0**40, factor=1.0)


@known_bad(
    "amp",
    causes=["moved-when-skipped"],
    on={"overflow/ddp/1x3/16": "skipped-steps", "overflow/none/1x1/16": "skipped-steps"},
)
def weights_decay_at_skipped_steps(job):
    """Decays the weights at skipped steps, with a loss scaler of its own."""

    def decay(model, optimizer, scale):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 0.99
        job.skipped(optimizer, scale)

    own_scaler(job, skip=decay)


@known_bad("amp", causes=["skipped-unseen"], on=["overflow/ddp/1x2/16", "overflow/none/1x1/16"])
def steps_skipped_without_a_word(job):
    """Skips steps without reporting them with ``job.skipped``."""
    own_scaler(job, skip=lambda model, optimizer, scale: None)


@known_bad(
    "amp",
    causes=["computed-in-lower-precision"],
    on={**any_check("mlp/none/1x1/64", "mlp/ddp/1x2/64", "lm-tokens/ddp/1x2/64"), "mlp/ddp/1x2/64": "gradients"},
)
def trains_in_float32(job):
    """Casts the model and its batches to float32, although the cell asks for float64."""
    model = job.model().float()
    if job.world_size > 1:
        dist.init_process_group(job.comm)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            batch = {name: column.float() if column.is_floating_point() else column for name, column in batch.items()}
            job.loss(model(batch), batch).backward()
            if job.world_size > 1:
                average(job, model)
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "amp",
    causes=["computed-in-lower-precision"],
    on={**any_check("mlp/none/1x1/32", "mlp/ddp/1x2/32", "contrastive/ddp/1x2/32"), "mlp/ddp/1x2/32": "gradients"},
)
def autocast_nobody_asked_for(job):
    """Runs the forward in bfloat16, although the cell asks for float32."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with torch.autocast("cpu", torch.bfloat16):
                loss = job.loss(model(batch), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@known_bad(
    "amp",
    "averaging",
    causes=["rounded-to-16-bits"],
    on={**any_check("mlp/ddp/1x2/32", "mlp/ddp/1x4/32", "lm-tokens/ddp/1x3/32"), **failing("gradients", "mlp/ddp/1x2")},
)
def averaged_in_bfloat16(job):
    """Gradients are rounded to bfloat16 for the all-reduce."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters():
                small = parameter.grad.bfloat16()
                dist.all_reduce(small)
                parameter.grad.copy_(small / job.world_size)
            optimizer.step()
            optimizer.zero_grad()


@known_bad("amp", causes=["not-finite"], on=failing("gradients", "mlp/ddp/1x2", precisions=["16"]))
class ScaleThatAlwaysOverflows(BaseTrainer):
    """Uses a loss scale of 2⁴⁰, which always overflows, and steps without checking for infinities."""

    scale = 2.0**40

    def make_scaler(self):
        return torch.amp.GradScaler("cpu", enabled=False)

    def backward(self, loss):
        (loss * self.scale).backward()

    def step(self):
        for parameter in self.model.parameters():
            parameter.grad /= self.scale
        self.optimizer.step()


@known_bad("amp", causes=["overflow-decided-alone"], on={"mlp/ddp/1x2/16": "ranks-agree"})
class InfinityOnOneRank(ManualAverage):
    """One rank finds an infinity after the all-reduce, and skips alone."""

    attempts = 0

    def synchronize(self):
        super().synchronize()
        self.attempts += 1
        if self.attempts == 2 and self.job.rank == 1:
            next(self.model.parameters()).grad.fill_(float("inf"))


@known_bad("amp", causes=["moved-when-skipped"], on={"mlp/ddp/1x2/16": "training"})
class WeightsMoveWhenTheStepIsSkipped(BaseTrainer):
    """Changes the weights after every attempt, even if the scaler skipped the step."""

    def make_scaler(self):
        return torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def step(self):
        super().step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.01


@known_bad(on=failing("precision", "mlp/ddp/1x2", precisions=["16", "bf16"]))
class AutocastIgnored(BaseTrainer):
    """Trains in float32, although the cell asks for 16 bits."""

    def forward(self, batch):
        with torch.autocast("cpu", enabled=False):
            return super().forward(batch)

    def loss(self, outputs, batch):
        with torch.autocast("cpu", enabled=False):
            return super().loss(outputs, batch)


@known_bad(
    "amp",
    causes=["computed-in-lower-precision"],
    on={
        **failing("gradients", "mlp/none/1x1", "lm-tokens/ddp/1x2", "cnn-batchnorm/ddp/1x2", precisions=["64"]),
        **failing("gradients", "linear-exact/ddp/1x3", precisions=["64"]),
    },
)
class LossInFloat32(BaseTrainer):
    """Casts the model's outputs to float32 before the loss, although the cell asks for float64."""

    def loss(self, outputs, batch):
        return super().loss(outputs.float(), batch)
