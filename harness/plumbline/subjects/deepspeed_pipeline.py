"""DeepSpeed's pipeline: a PipelineModule of the model's layers, and ``engine.train_batch``.

https://www.deepspeed.ai/tutorials/pipeline. Its accumulation steps are the micro-batches of a batch.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, DistributedSampler

from plumbline.subjects.declare import subject
from plumbline.subjects.deepspeed_trainer import deepspeed, settings
from plumbline.subjects.torch_pp import without_parameters

from deepspeed.pipe import PipelineModule, TiedLayerSpec  # isort: skip


@subject(
    name="deepspeed",
    backends=["pp"],
    precisions=["32"],
    capabilities=["clipping", "scheduler"],
    library="deepspeed",
)
def train(job):
    deepspeed.init_distributed(job.comm)
    torch.manual_seed(job.seed)
    model = job.model()
    names = list(next(iter(DataLoader(job.dataset))))
    layers = layers_of(model, names)
    model.forward = layers[0]  # so that job.model() is called with the batch
    net = PipelineModule(
        [lambda columns: model(dict(zip(names, columns, strict=True))), *layers[1:]],
        num_stages=job.world_size,
        loss_fn=lambda outputs, columns: job.loss(outputs, dict(zip(names, columns, strict=True))),
    )
    held = {name: one for name, one in tensors_of(model) if any(one is own for _, own in tensors_of(net))}
    trained = [one for one in held.values() if isinstance(one, torch.nn.Parameter)]
    optimizer = job.optimizer(trained) if trained else without_parameters(job)[0]
    with job.holding(held):
        with job.trial():
            # DeepSpeed removes groups without parameters before it creates the schedule.
            engine, *_ = deepspeed.initialize(
                model=net, optimizer=optimizer, lr_scheduler=job.scheduler, config=pipeline_settings(job)
            )
        fit(job, engine)
    gather(model, held)


def pipeline_settings(job):
    return settings(job) | {
        "train_micro_batch_size_per_gpu": job.batch_size // job.micro_batches,
        "gradient_accumulation_steps": job.micro_batches,
    }


def fit(job, engine):
    sampler = DistributedSampler(job.dataset, job.data_ranks, job.data_rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size // job.micro_batches, sampler=sampler)
    micro_batches = in_epochs(job, sampler, loader)
    for _ in range(job.epochs * len(loader) // job.micro_batches):
        job.log("loss", engine.train_batch(micro_batches))


def in_epochs(job, sampler, loader):
    """Yield the micro-batches of all epochs, for the first and the last stage."""
    for epoch in range(job.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            columns = tuple(batch.values())
            yield columns, columns


def tensors_of(module):
    return [*module.named_parameters(), *module.named_buffers()]


def gather(model, held):
    for name, tensor in tensors_of(model):
        holders = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(holders, name in held)
        torch.distributed.broadcast(tensor.data, holders.index(True))


def layers_of(model, columns):
    """Return a job's model as a list of layers. The first one takes the batch."""
    if "views" in columns:
        return [lambda batch: batch["views"], *model.layers, lambda x: torch.nn.functional.normalize(x, dim=-1)]
    if hasattr(model, "by_token"):
        return [*drawn_layers(model)]
    if hasattr(model, "layers"):
        return [lambda batch: batch["x"], *model.layers]
    if hasattr(model, "features"):
        return [lambda batch: batch["image"], *model.features, lambda x: x.mean((2, 3)), model.head]
    if hasattr(model, "places"):
        return [
            lambda batch: batch["tokens"][:, :-1],
            TiedLayerSpec("tokens", Tied, model.tokens),
            Called(model.places, lambda places, x: x + places(torch.arange(x.shape[1]))),
            Called((model.norm_1, model.attention), lambda both, x: x + both[1](both[0](x))),
            Called((model.norm_2, model.feed), lambda both, x: x + both[1](both[0](x))),
            model.norm_3,
            TiedLayerSpec("tokens", Tied, model.tokens, forward_fn=lambda tokens, x: x @ tokens.weight.T),
        ]
    if hasattr(model, "drop_middle") and not hasattr(model.drop_middle, "coins"):
        return [
            lambda batch: (batch["x"], batch["index"]),
            Called(model.first, lambda first, both: (first(both[0]).tanh(), both[1])),
            lambda both: (model.drop_first(*both), both[1]),
            Called(model.middle, lambda middle, both: (middle(both[0]).tanh(), both[1])),
            lambda both: model.drop_middle(*both),
            model.last,
        ]
    if hasattr(model, "mix"):
        return [
            lambda batch: batch["tokens"][:, :-1],
            model.embedding,
            lambda x: torch.cat((x, x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]), -1),
            Called(model.mix, lambda mix, x: mix(x).tanh()),
            model.head,
        ]
    raise NotImplementedError(f"{type(model).__name__} is not written as a sequence of layers")


def drawn_layers(model):
    """Yield the layers of a generated problem. Each sample's index is passed along, for dropout masks."""
    yield lambda batch: (batch["x"] if "x" in batch else batch["tokens"][:, :-1], batch["index"])
    yield Called(model.first, lambda first, both: (by_place(first(both[0])), both[1]))
    for layer in model.layers:
        if hasattr(layer, "masks"):
            yield Called(layer, lambda dropout, both: (dropout(*both), both[1]))
        else:
            yield Called(layer, lambda layer, both: (layer(both[0]), both[1]))
    yield Called(
        model.head, lambda head, both: head(both[0] if model.by_token or both[0].dim() == 2 else both[0].mean(1))
    )


def by_place(x):
    """Return the pixels of images as tokens, channels last."""
    return x.flatten(2).transpose(1, 2).contiguous() if x.dim() == 4 else x


class Tied(torch.nn.Embedding):
    """An embedding that shares the weight of another."""

    def __init__(self, table):
        super().__init__(*table.weight.shape)
        self.weight = table.weight


class Called(torch.nn.Module):
    """Layers, and how they are called."""

    def __init__(self, layers, call):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers) if isinstance(layers, tuple) else layers
        self.call = call

    def forward(self, x):
        return self.call(self.layers, x)
