"""DeepSpeed: a training loop with its engine and all ZeRO stages, and its pipeline.

The pipeline is a PipelineModule of the model's layers, trained with ``engine.train_batch``
(https://www.deepspeed.ai/tutorials/pipeline). DeepSpeed's accumulation steps are the micro-batches of a batch there.
"""

import sys

import torch
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import FlatPart
from plumbline.subjects.declare import CAPABILITIES as EVERY
from plumbline.subjects.declare import subject
from plumbline.subjects.released import installed_by, weighted
from plumbline.subjects.torch_pp import without_parameters

with installed_by("pip install deepspeed"):
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

# On a CPU, DeepSpeed's first process would compile a kernel. If it is killed meanwhile, its lock file would remain.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

STAGES = {"none": 0, "ddp": 0, "pp": 0, "zero": 1, "zero2": 2, "fsdp": 3}

CAPABILITIES = EVERY - {"several-optimizers", "sparse-gradients", "matrix-optimizer"}


# DeepSpeed refuses to average gradients in float64.
DECLARED = {"library": "deepspeed", "precisions": ["32", "16", "bf16"], "buffers": "per-rank"}


@subject(name="deepspeed", backends=["none", "ddp"], capabilities=CAPABILITIES, **DECLARED)
def train(job):
    fit(job)


# ZeRO averages only the gradients that a rank has. If ranks use different parameters, it hangs or fails.
OF_ZERO = CAPABILITIES - {"unused-parameters"}


# `bf16.enabled` casts the model to bfloat16; ZeRO's partitions are float32 master weights.
MASTER_WEIGHTS = "bf16-master"
WITH_MASTERS = DECLARED | {"precisions": [*DECLARED["precisions"], MASTER_WEIGHTS]}


@subject(name="deepspeed", backends=["zero", "zero2", "fsdp"], capabilities=OF_ZERO, **WITH_MASTERS)
def train_zero(job):
    fit(job)


def settings(job):
    return {
        "train_micro_batch_size_per_gpu": job.batch_size,
        "gradient_accumulation_steps": job.accumulate,
        "gradient_clipping": job.clip_norm or 0.0,
        "zero_optimization": {"stage": STAGES[job.backend]},
        "zero_allow_untested_optimizer": True,  # SGD
        "torch_autocast": {
            "enabled": job.precision in ("16", "bf16"),
            "dtype": "float16" if job.precision == "16" else "bfloat16",
        },
        "bf16": {"enabled": job.precision == MASTER_WEIGHTS},
        "steps_per_print": 10**9,
    }


def fit(job, backward=lambda engine, loss: engine.backward(loss)):
    deepspeed.init_distributed(job.comm)
    torch.manual_seed(job.seed + job.rank)
    model = job.model_with_loss()
    parameters = dict(model.model.named_parameters())
    optimizer = job.optimizer(model.parameters())
    with job.trial():  # ZeRO takes a step with zero gradients to create the optimizer's state
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=job.scheduler(optimizer), config=settings(job)
        )
    job.parts(flat_parts(engine, parameters))
    sampler = DistributedSampler(job.dataset, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    val_loader = DataLoader(job.val_dataset, batch_size=job.batch_size)
    progress = {"epoch": 0, "batches": 0}
    if job.resume:
        _, progress = engine.load_checkpoint(job.checkpoint_dir)
    for epoch in range(progress["epoch"], job.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
        for number, batch in enumerate(loader):
            if epoch == progress["epoch"] and number < progress["batches"]:
                continue  # trained before the interruption
            loss = engine(**batch.to(engine.device)).loss
            backward(engine, loss)
            stepped = engine.is_gradient_accumulation_boundary()
            scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)  # ZeRO's, in float16
            scale = scaler.get_scale() if scaler else None
            engine.step()
            if stepped and scaler and not engine.was_step_applied():
                job.skipped(optimizer, scale)  # DeepSpeed skips this step without telling its GradScaler
            sums += weighted(loss, batch)
            if stepped and engine.global_steps == job.stop_after_step:
                engine.save_checkpoint(job.checkpoint_dir, client_state={"epoch": epoch, "batches": number + 1})
                return
            if job.validate_every and (number + 1) % job.validate_every == 0:
                job.log("val_loss", evaluate(engine, val_loader))
        if sums.any():  # not if training was interrupted at the end of the epoch
            deepspeed.comm.all_reduce(sums)
            job.log("loss", sums[0] / sums[1])


@torch.no_grad()
def evaluate(engine, loader):
    # Every rank evaluates all samples, because stage 3 gathers weights in each forward.
    engine.eval()
    sums = 0
    for batch in loader:
        sums += weighted(engine(**batch.to(engine.device)).loss, batch)
    engine.train()
    return sums[0] / sums[1]


def flat_parts(engine, parameters):
    """Return this rank's part of each parameter, or an empty dict if ZeRO does not partition parameters."""
    stage, zero = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        trained = {
            zero.param_dict[key]: FlatPart(zero.fp32_partitioned_groups_flat[group], offset, length, 0)
            for key, (group, offset, length) in zero.grad_position.items()
        }
        return {name: of_stage_3(one, trained.get(one)) for name, one in parameters.items()}
    if stage in (1, 2):
        groups = zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        names = {one: name for name, one in parameters.items()}
        return {names[one]: of_fragment(one._hp_mapping, flat) for group, flat in groups for one in group}
    return {}


def of_fragment(fragment, flat):
    if fragment is None:
        return FlatPart(flat, 0, 0, 0)
    low, high = fragment.lp_fragment_address, fragment.hp_fragment_address
    return FlatPart(flat, high.start, high.numel, low.start)


def of_stage_3(parameter, trained):
    # All ranks have the same number of entries; the last entries are padding.
    flat, offset, size = (parameter.ds_tensor, 0, parameter.partition_numel()) if trained is None else trained[:3]
    begin = min(deepspeed.comm.get_rank() * size, parameter.ds_numel)
    return FlatPart(flat, offset, min(size, parameter.ds_numel - begin), begin)


@subject(
    name="deepspeed",
    backends=["pp"],
    precisions=["32"],
    capabilities=["clipping", "scheduler"],
    library="deepspeed",
    batches="equal",  # the configuration has the size of micro-batches
)
def train_pipeline(job):
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
            config = settings(job) | {
                "train_micro_batch_size_per_gpu": job.batch_size // job.micro_batches,
                "gradient_accumulation_steps": job.micro_batches,
            }
            engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, lr_scheduler=job.scheduler, config=config)
        fit_pipeline(job, engine)
    gather(model, held)


def fit_pipeline(job, engine):
    sampler = DistributedSampler(job.dataset, job.data_ranks, job.data_rank, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size // job.micro_batches, sampler=sampler)
    micro_batches = in_epochs(job, sampler, loader)
    for _ in range(job.epochs * len(loader) // job.micro_batches):
        job.log("loss", engine.train_batch(micro_batches))


def in_epochs(job, sampler, loader):
    """Yield the micro-batches of all epochs as (inputs, labels), for the first and the last stage."""
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
    """Return a job's model as a list of layers, the first of which takes the batch."""
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
    """Yield the layers of a generated problem. They pass on each sample's index, which dropout masks depend on."""
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
    """An embedding that shares the weight of ``table``."""

    def __init__(self, table):
        super().__init__(*table.weight.shape)
        self.weight = table.weight


class Called(torch.nn.Module):
    """Applies ``call`` to layers and an input."""

    def __init__(self, layers, call):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers) if isinstance(layers, tuple) else layers
        self.call = call

    def forward(self, x):
        return self.call(self.layers, x)
