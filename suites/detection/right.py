"""Right trainers that look wrong: none of them may be flagged."""

from __future__ import annotations

import contextlib

import reporting
import torch
import torch.distributed as dist
from expect import known_good
from loop import (
    alone,
    average,
    ddp,
    loader,
    mesh_of,
    own_scaler,
    replicas,
    sharded,
    train,
    train_scaled,
    windows,
    wrapped,
    zero,
)
from otherwise import by_iterations, in_epochs, seeded, with_own_buffers
from resumable import Run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

PLAIN = ["mlp/ddp/1x2/32", "mlp/ddp/1x3/64", "mlp/ddp/1x4/bf16", "mlp/ddp/1x3/bf16-true", "linear-exact/ddp/1x4/32"]
ITERATIONS = ["mlp/ddp/1x2/32", "mlp/ddp/1x3/64"]
ITERATED_WINDOWS = ["accumulation/ddp/1x2/32", "accumulation/ddp/1x3/32"]
ORDERED = ["mlp/ddp/1x2/32", "mlp/ddp/1x3/64", "sequential/ddp/1x3/32"]
BUFFERED = ["cnn-batchnorm/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64"]


def fit(job, model):
    """Train correctly, in autocast and with the job's loss scaler."""
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    train_scaled(job, model, optimizer, scaler)


@known_good(on=PLAIN)
def tiny_buckets(job):
    """Uses one bucket per parameter, so reductions run in another order than with one large bucket."""
    fit(job, ddp(job, bucket_cap_mb=0.0001))


@known_good(on=[*PLAIN, "mlp/ddp/2x2/16"])
def divided_before_the_sum(job):
    """Divides gradients before gathering them, and adds them from the last rank to the first."""
    model = alone(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            for parameter in model.parameters():
                parts = [torch.empty_like(parameter) for _ in range(job.world_size)]
                dist.all_gather(parts, parameter.grad / job.world_size)
                parameter.grad = sum(reversed(parts))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@known_good(on=PLAIN)
def loss_divided_gradients_summed(job):
    """Divides the loss by the world size and sums gradients, which gives the same mean."""
    model = alone(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch) / job.world_size
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=PLAIN)
def gradients_are_views_of_the_buckets(job):
    """Uses ``gradient_as_bucket_view`` and a static graph, so the next step overwrites gradients."""
    fit(job, ddp(job, gradient_as_bucket_view=True, static_graph=True))


@known_good(on=["cnn-batchnorm/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64"], deviates=True)
def buffers_differ_after_the_forward(job):
    """Plain BatchNorm: each replica has its own statistics, and buffers are broadcast only at the next forward."""
    fit(job, ddp(job))


@known_good(on=["cnn-batchnorm/dp/1x2/32", "cnn-batchnorm/ddp2/2x2/64"], deviates=True)
def statistics_of_each_replica(job):
    """With dp and ddp2, each device normalises its own chunk, and the loss is that of the gathered outputs."""
    model = wrapped(job)
    inner = model.module if job.world_size > 1 else model
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            outputs, _ = replicas(job, inner, batch)
            job.loss(torch.cat(outputs), batch).backward()
            if job.world_size > 1:
                average(job, inner)
                for buffer in inner.buffers():
                    dist.broadcast(buffer, 0)
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["lm-tokens/ddp/1x2/32", "lm-tokens/ddp/1x3/64", "accumulation-tokens/ddp/1x2/32"], deviates=True)
def mean_of_each_ranks_token_mean(job):
    """Ranks have unequal numbers of tokens, and DDP averages their means, as documented."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for batch in window:
                (job.loss(model(batch), batch) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["uneven/ddp/1x2/32", "uneven/ddp/1x3/64", "uneven/ddp/1x4/16"])
def sampler_pads_the_last_batch(job):
    """DistributedSampler repeats at most ``world_size - 1`` samples to make shares equal."""
    fit(job, ddp(job))


@known_good(on=["uneven/ddp/1x2/32", "uneven/ddp/1x4/64"], deviates=True)
def uneven_last_batch(job):
    """Does not pad: ranks have unequal shares of the last batch, and DDP averages their means."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(job.seed + epoch))
        for first in range(0, len(order), job.global_batch_size):
            own = order[first : first + job.global_batch_size][job.rank :: job.world_size]
            batch = job.dataset.batch(own.tolist())
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["mlp/ddp/1x2/16", "mlp/none/1x1/16", "lm-tokens/none/1x1/16", "linear-exact/ddp/1x2/16"])
def first_steps_skipped(job):
    """Starts with a loss scale that is too large, so the scaler skips steps and halves it."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**19)
    train_scaled(job, model, optimizer, scaler)


@known_good(on=["overflow/ddp/1x2/16", "overflow/ddp/1x3/16", "overflow/none/1x1/16"])
def planned_overflow(job):
    """One rank overflows and all ranks skip, because the all-reduce spreads the infinity."""
    fit(job, wrapped(job))


@known_good(on=["overflow-schedule/ddp/1x2/16", "overflow-schedule/none/1x1/16"])
def schedule_waits_for_a_skipped_step(job):
    """Does not step the scheduler if the scaler skipped the step."""
    model = wrapped(job)
    optimizer, scaler = job.optimizer(model.parameters()), job.grad_scaler()
    scheduler = job.scheduler(optimizer)
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            with job.autocast():
                loss = job.loss(model(batch), batch)
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
            optimizer.zero_grad()


@known_good(on=["accumulation/ddp/1x2/32", "accumulation/ddp/1x3/64", "accumulation/none/1x1/32"])
def synchronised_once_a_window(job):
    """``no_sync`` for all micro-batches but the last: fewer all-reduces, the same average."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for window in windows(job, epoch):
            for batch in window:
                waits = batch is not window[-1] and job.world_size > 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    (job.loss(model(batch), batch) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["clipping/ddp/1x2/32", "clipping-adamw/ddp/1x3/64", "clipping/none/1x1/32"])
def clipped_by_hand(job):
    """Clips by hand: adds squared norms tensor by tensor, and scales all gradients by one factor."""
    model = alone(job) if job.world_size > 1 else job.model()
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            if job.world_size > 1:
                average(job, model)
            norm = sum(parameter.grad.square().sum() for parameter in model.parameters()).sqrt()
            for parameter in model.parameters():
                parameter.grad *= min(1.0, job.clip_norm / (float(norm) + 1e-6))
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["contrastive/ddp/1x2/32", "contrastive/ddp/1x3/64"])
def negatives_gathered_with_gradient(job):
    """Computes the loss of all ranks' outputs and differentiates through the gather, like one device."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            first, second = torch.cat(dist.nn.functional.all_gather(model(batch))).unbind(1)
            similarity = first @ second.T / 0.5
            cross_entropy(similarity, torch.arange(len(similarity))).backward()
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["cnn-batchnorm/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/64"])
def sync_batchnorm(job):
    """Uses all ranks' statistics, forward and backward, like one device."""
    model = ddp(job)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.forward = lambda x, layer=layer: normalise_over_all_ranks(x, layer)
    fit(job, model)


def normalise_over_all_ranks(x, layer):
    """Apply BatchNorm over all ranks' samples, and update its running statistics."""
    moments = torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))])
    mean, square = dist.nn.functional.all_reduce(moments) / dist.get_world_size()
    variance = square - mean.square()
    count = x.numel() / x.shape[1] * dist.get_world_size()
    with torch.no_grad():
        layer.running_mean.lerp_(mean, layer.momentum)
        layer.running_var.lerp_(variance * count / (count - 1), layer.momentum)
        layer.num_batches_tracked += 1
    normal = (x - mean[:, None, None]) * (variance[:, None, None] + layer.eps).rsqrt()
    return normal * layer.weight[:, None, None] + layer.bias[:, None, None]


@known_good(on=["unused-parameters/ddp/1x2/32", "unused-parameters/ddp/1x4/64", "unused-at-the-end/ddp/1x2/32"])
def unused_parameters_looked_for(job):
    """Sets ``find_unused_parameters``: a parameter that a rank did not use counts as zero there."""
    fit(job, ddp(job, find_unused_parameters=True))


@known_good(on=["mlp/ddp/1x2/32", "mlp/none/1x1/32"])
def gradients_zeroed_in_place(job):
    """Zeroes gradients between steps instead of setting them to None."""
    model = wrapped(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            optimizer.zero_grad(set_to_none=False)
            job.loss(model(batch), batch).backward()
            optimizer.step()


@known_good(on=["mlp/ddp/1x2/32", "mlp/ddp/1x4/64"])
def another_permutation(job):
    """Draws samples by hand: contiguous parts of each global batch, in an order that depends on the epoch alone."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
        for first in range(0, len(order), job.global_batch_size):
            batch = job.dataset.batch(order[first + job.rank * job.batch_size :][: job.batch_size])
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()


MASKS = ["random-masks/ddp/1x2/32", "random-masks/ddp/1x3/64", "random-masks/ddp/2x2/32"]


@known_good(on=MASKS)
def seeded_by_seed_and_rank(job):
    """Seeds each rank's generator with the sum of the seed and the rank."""
    torch.manual_seed(job.seed + job.rank)
    fit(job, ddp(job))


@known_good(on=MASKS)
def seeded_by_the_generators_first_seed(job):
    """Adds a multiple of the rank to the seed that all ranks begin with."""
    torch.manual_seed(job.seed)
    torch.manual_seed(torch.initial_seed() + 1000003 * job.rank)
    fit(job, ddp(job))


@known_good(on=MASKS)
def seeded_anew_with_every_step(job):
    """Reseeds for every batch, from the rank and the number of the batch, as restartable trainers do."""
    model = ddp(job)
    optimizer = job.optimizer(model.parameters())
    step = 0
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            torch.manual_seed(job.seed + step * job.world_size + job.rank)
            job.loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1


@known_good(on=MASKS)
def one_state_advanced_differently(job):
    """Gives all ranks one generator state, but advances each far enough that their streams never overlap."""
    model = ddp(job)
    state = torch.get_rng_state()
    dist.broadcast(state, 0)
    torch.set_rng_state(state)
    torch.rand(job.rank, 1_000_000)
    fit(job, model)


@known_good(on=["random-masks/dp/1x2/32", "random-masks/ddp2/2x2/64"])
def replicas_draw_from_one_generator(job):
    """The devices of a process draw from one generator, one after the other."""
    model = wrapped(job)
    inner = model.module if job.world_size > 1 else model
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(torch.cat(replicas(job, inner, batch)[0]), batch).backward()
            if job.world_size > 1:
                average(job, inner)
            optimizer.step()
            optimizer.zero_grad()


SEVERAL = ["several-optimizers/ddp/1x2/32", "several-optimizers/ddp/1x3/64", "several-optimizers/none/1x1/32"]


@known_good(on=SEVERAL)
def the_second_optimizer_first(job):
    """Steps both optimizers after one backward, the second one first."""
    model = wrapped(job)
    optimizers = job.optimizers(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
                optimizer.zero_grad()


@known_good(on=SEVERAL)
def optimizers_take_turns(job):
    """Runs a pass over the batch for each optimizer, the second after the first has stepped."""
    model = wrapped(job)
    optimizers = job.optimizers(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            for optimizer in optimizers:
                model.zero_grad()
                job.loss(model(batch), batch).backward()
                optimizer.step()


@known_good(on=SEVERAL)
def a_pass_for_each_optimizer_before_any_steps(job):
    """Differentiates a pass for each optimizer by its own parameters alone, and then steps both."""
    model = alone(job) if job.world_size > 1 else job.model()
    optimizers = job.optimizers(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            for optimizer in optimizers:
                own = optimizer.param_groups[0]["params"]
                for parameter, gradient in zip(
                    own, torch.autograd.grad(job.loss(model(batch), batch), own), strict=True
                ):
                    parameter.grad = gradient
            if job.world_size > 1:
                average(job, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@known_good(on=["thawed/ddp/1x2/32", "thawed/ddp/1x3/64", "thawed/none/1x1/32"])
def averaged_where_somebody_has_a_gradient(job):
    """Averages by hand: a parameter that no rank used keeps no gradient, and does not move."""
    model = alone(job) if job.world_size > 1 else job.model()
    optimizer = job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            for parameter in model.parameters() if job.world_size > 1 else ():
                users = torch.tensor(float(parameter.grad is not None))
                dist.all_reduce(users)
                if users:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= job.world_size
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["thawed/ddp/1x2/32", "thawed/ddp/1x3/64"])
def unused_ones_looked_for_while_a_layer_thaws(job):
    """DDP searches for unused parameters at every step, while a layer thaws."""
    fit(job, ddp(job, find_unused_parameters=True))


RESUMED = [
    "checkpoint/ddp/1x2/32", "checkpoint/ddp/1x3/16", "checkpoint/none/1x1/16",
    "checkpoint-elastic/ddp/1x2/32", "checkpoint-elastic/ddp/1x3/32", "checkpoint-windows/ddp/1x3/32",
]  # fmt: skip
SAME_RANKS = [cell for cell in RESUMED if "elastic" not in cell]


@known_good(on=RESUMED)
def batches_drawn_and_thrown_away(job):
    """Resumes by drawing the epoch again, and discards the batches that were trained on."""
    Run(job).train()


@known_good(on=RESUMED)
def samples_skipped_in_the_sampler(job):
    """Resumes by cutting the epoch's order, counted in samples over all ranks, and sharding the rest again."""
    run = Run(job)

    def draw(epoch):
        order = torch.randperm(len(job.dataset), generator=torch.Generator().manual_seed(job.seed + epoch))
        rest = order[run.batches * job.global_batch_size :]
        own = [batch[job.rank :: job.world_size].tolist() for batch in rest.split(job.global_batch_size)]
        return list(enumerate(map(job.dataset.batch, own), start=run.batches + 1))

    run.draw = draw
    run.train()


@known_good(on=SAME_RANKS)
def every_rank_has_its_own_file(job):
    """Each rank saves a file of its own, with the same contents."""
    run = Run(job)
    run.file = f"{job.checkpoint_dir}/rank-{job.rank}.pt"
    run.save = lambda: torch.save(run.state(), run.file)
    run.train()


@known_good(on=RESUMED)
def saved_in_float64(job):
    """Saves everything in float64, which loses nothing."""
    run = Run(job)
    state = run.state
    run.state = lambda: torch.utils._pytree.tree_map(
        lambda value: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value,
        state(),
    )
    run.train()


@known_good(on=RESUMED)
def rank_zero_reads_for_all(job):
    """Only rank 0 reads the file, and broadcasts its contents."""
    run = Run(job)
    read = run.read

    def receive():
        box = [read() if job.rank == 0 else None]
        if job.world_size > 1:
            dist.broadcast_object_list(box)
        return box[0]

    run.read = receive
    run.train()


@known_good(on=RESUMED)
def saved_with_the_prefix_of_ddp(job):
    """Saves the wrapped model, with DDP's prefix in its keys, and loads it into a wrapped model."""
    run = Run(job)
    parts = run.parts
    run.parts = lambda: {**parts(), "model": run.model}
    run.train()


@known_good(on=["checkpoint/ddp/1x2/16", "checkpoint/none/1x1/16"])
def skipped_steps_not_counted(job):
    """Stops after the requested number of taken steps, not counting those that the GradScaler skipped."""
    run = Run(job)
    step = run.step

    def counting_step():
        scale = run.scaler.get_scale()
        step()
        run.steps -= run.scaler.get_scale() < scale

    run.step = counting_step
    run.train()


@known_good(on=["overflow/ddp/1x2/16", "overflow/ddp/1x3/16", "overflow/none/1x1/16", "mlp/ddp/1x2/16"])
def a_loss_scaler_of_ones_own(job):
    """Uses a hand-written loss scaler, and reports the steps that it skips."""
    own_scaler(job)


@known_good(on=["random-masks/ddp/1x2/32", "random-masks/none/1x1/64"])
def activations_computed_once_more(job):
    """Recomputes the middle dropout in the backward with the forward's masks, by reentrant checkpointing."""
    inner = job.model()
    again = inner.drop_middle.forward
    inner.drop_middle.forward = lambda x, batch: checkpoint(again, x, batch, use_reentrant=True)
    model = inner
    if job.world_size > 1:
        dist.init_process_group(job.comm)
        model = nn.parallel.DistributedDataParallel(inner)
    train(job, model)


REPORTED = ["metrics/none/1x1/32", "metrics/ddp/1x2/32", "metrics/ddp/1x3/16"]


@known_good(on=[*REPORTED, "validation/none/1x1/32"])
def evaluates_with_gradients_enabled(job):
    """Evaluates without ``no_grad``, which is wasteful but not wrong."""

    def evaluate(job, model):
        with torch.enable_grad():
            model.eval()
            batch = job.val_dataset.batch(reporting.share(job))
            with job.autocast():
                loss = job.loss(model(batch), batch)
            model.train()
        job.log("val_loss", reporting.weighted(job, [float(loss)], [len(batch["index"])]))

    reporting.fit(job, evaluate=evaluate)


@known_good(on=REPORTED)
def rank_zero_alone_evaluates(job):
    """Rank 0 evaluates all held-out samples, and only rank 0 reports."""

    def evaluate(job, model):
        if job.rank == 0:
            losses, sizes = reporting.evaluation(job, model, range(len(job.val_dataset)))
            job.log("val_loss", sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes))

    reporting.fit(job, evaluate=evaluate)


@known_good(on=REPORTED)
def everybody_evaluates_everything(job):
    """Every rank evaluates all held-out samples, and gets the same value."""

    def evaluate(job, model):
        losses, sizes = reporting.evaluation(job, model, range(len(job.val_dataset)))
        job.log("val_loss", sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes))

    reporting.fit(job, evaluate=evaluate)


@known_good(on=[*REPORTED, "validation/none/1x1/32"])
def looks_before_it_begins(job):
    """Evaluates a few samples before training, as a check, and all samples again after each epoch."""
    batches = -(-len(job.dataset) // job.global_batch_size)
    reporting.fit(
        job,
        before_all=lambda model: reporting.evaluation(job, model, range(4)),
        due=lambda number, last: number % job.validate_every == 0 or number == batches,
    )


@known_good(on=[*REPORTED, "mlp/ddp/1x2/64", "uneven/ddp/1x3/32"])
def reports_at_the_end_of_each_epoch(job):
    """Reports the mean over all ranks' samples of the epoch."""
    reporting.fit(job, after_epoch=lambda *epoch: job.log("loss", reporting.weighted(job, *epoch)))


@known_good(on=[*REPORTED, "mlp/ddp/1x2/64", "uneven/ddp/1x3/32"])
def reports_every_step(job):
    """Each rank reports the mean over all ranks' samples of the step."""
    reporting.fit(job, after_step=lambda model, *step: job.log("loss", reporting.weighted(job, *step)))


@known_good(on=[*REPORTED, "mlp/ddp/1x2/bf16"])
def reports_now_and_then(job):
    """Reports every second step: the mean over all samples since the last report, summed in float32."""
    since, steps = [], [0]

    def after_step(model, losses, sizes):
        since.extend(zip(losses, sizes, strict=True))
        steps[0] += 1
        if steps[0] % 2 == 0:
            sums = torch.tensor(since).prod(1).sum(), torch.tensor(since)[:, 1].sum()
            sums = torch.stack(sums)
            if job.world_size > 1:
                dist.all_reduce(sums)
            job.log("loss", sums[0] / sums[1])
            since.clear()

    reporting.fit(job, after_step=after_step)


SHARDED = ["mlp/fsdp/1x2/32", "mlp/fsdp/1x3/64", "mlp/fsdp/1x4/16", "linear-exact/fsdp/1x4/32"]


@known_good(on=SHARDED)
def shards_of_rows_that_some_ranks_have_none_of(job):
    """Shards all weights as one unit, gathered once: a tensor of two rows has none on the third rank."""
    fit(job, sharded(job, reshard_after_forward=False))


@known_good(on=["mlp/fsdp/1x2/32", "mlp/fsdp/1x4/64", "linear-exact/fsdp/1x4/32"])
def shards_of_columns(job):
    """Shards each tensor along its last dimension."""
    fit(job, sharded(job, shard_placement_fn=lambda parameter: Shard(parameter.dim() - 1)))


@known_good(on=["mlp/fsdp/2x2/32", "mlp/fsdp/2x2/bf16", "transformer/fsdp/2x2/32"])
def a_copy_on_each_node_in_shards(job):
    """Shards the model over each node's devices, and averages gradients over the nodes."""
    fit(job, fully_shard(job.model(), mesh=mesh_of(job)))


@known_good(on=["mlp/fsdp/1x2/32", "mlp/fsdp/1x3/64"])
def some_layers_in_shards_and_others_not(job):
    """Shards the first layer, and averages the last layer's gradients by hand."""
    mesh, model = mesh_of(job), job.model()
    fully_shard(model.layers[0], mesh=mesh)
    optimizer = job.optimizer(model.parameters())
    optimizer.param_groups[0]["foreach"] = False  # foreach cannot mix DTensors and tensors
    for epoch in range(job.epochs):
        for batch in loader(job, epoch):
            job.loss(model(batch), batch).backward()
            average(job, model.layers[2])
            optimizer.step()
            optimizer.zero_grad()


@known_good(on=["mlp/zero/1x2/32", "mlp/zero/1x3/64", "mlp/zero/1x4/16"])
def weights_are_views_of_what_is_broadcast(job):
    """ZeroRedundancyOptimizer keeps weights in buckets, and broadcasts these after the step."""
    model = ddp(job)
    optimizer, scaler = zero(job, model, parameters_as_bucket_view=True), job.grad_scaler()
    train_scaled(job, model, optimizer, scaler)


@known_good(on=[*ITERATIONS, *ITERATED_WINDOWS, "random-masks/ddp/1x3/32", "mlp/none/1x1/16"], data="iterations")
def windows_with_replacement(job):
    """Each rank draws with replacement, so some samples occur several times in a step."""
    by_iterations(job)


@known_good(on=[*ITERATIONS, *ITERATED_WINDOWS], data="iterations")
def windows_run_over_the_end_of_an_epoch(job):
    """Draws batches across epochs: a window may begin in one epoch and end in the next."""

    def stream():
        epoch = 0
        while True:
            yield from loader(job, epoch)
            epoch += 1

    by_iterations(job, stream().__next__)


@known_good(on=ITERATIONS, data="iterations")
def samples_of_unequal_weight(job):
    """Draws some samples far more often, and sorts each batch, so that draws are similar by chance."""
    generator = seeded(job)
    weights = torch.arange(1.0, len(job.dataset) + 1) ** 2

    def draw():
        chosen = torch.multinomial(weights, job.batch_size, replacement=True, generator=generator)
        return job.dataset.batch(chosen.sort().values.tolist())

    by_iterations(job, draw)


@known_good(on=ORDERED, shuffle="always")
def always_shuffled(job):
    """Always shuffles, as declared, whatever the job says."""
    in_epochs(job, shuffle=True)


@known_good(on=ORDERED, shuffle="never")
def never_shuffled_by_declaration(job):
    """Never shuffles, as declared, whatever the job says."""
    in_epochs(job, shuffle=False)


@known_good(on=[*BUFFERED, "validation/ddp/1x2/32"], deviates=True, buffers="per-rank")
def buffers_of_each_rank(job):
    """Keeps running statistics of each rank's own samples, as Horovod's and DeepSpeed's trainers do."""
    model = ddp(job, broadcast_buffers=False)
    inner, optimizer = model.module, job.optimizer(model.parameters())
    for epoch in range(job.epochs):
        own = list(loader(job, epoch))
        for number, batch in enumerate(own):
            begin = number - number % job.accumulate
            window = len(own[begin : begin + job.accumulate])
            (job.loss(model(batch), batch) / window).backward()
            batches = number + 1
            if batches == len(own) or batches % job.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
            if job.validate_every and batches % job.validate_every == 0:
                inner.eval()
                with torch.no_grad():
                    inner(job.val_dataset.batch(range(len(job.val_dataset))))
                inner.train()


@known_good(on=["mlp/ddp/1x2/32"], buffers="per-rank")
def no_buffers_at_all(job):
    """Declares buffers per rank for a model without buffers, which has no effect."""
    with_own_buffers(job)
