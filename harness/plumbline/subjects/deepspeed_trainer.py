"""DeepSpeed under test: a loop of one's own around its engine, with ZeRO in all stages."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import FlatPart
from plumbline.subjects.declare import subject

import deepspeed  # isort: skip

# On a cpu its first process would compile a kernel, with a lock that remains where it is ended meanwhile.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

STAGES = {"none": 0, "ddp": 0, "pp": 0, "zero": 1, "zero2": 2, "fsdp": 3}

CAPABILITIES = [
    "accumulation", "clipping", "scheduler", "validation", "checkpoint", "metrics",
    "unused-parameters", "frozen-parameters", "nested-outputs",
]  # fmt: skip


@subject(
    name="deepspeed",
    backends=["none", "ddp"],
    precisions=["32", "16", "bf16"],  # it refuses to average gradients in float64
    capabilities=CAPABILITIES,
    library="deepspeed",
    buffers="per-rank",
)
def train(job):
    fit(job)


# It averages the gradients that a rank has: where ranks use different parameters it hangs or breaks.
OF_ZERO = [name for name in CAPABILITIES if name != "unused-parameters"]


@subject(
    name="deepspeed",
    backends=["zero", "zero2"],
    precisions=["32", "16", "bf16"],
    capabilities=OF_ZERO,
    library="deepspeed",
    buffers="per-rank",
)
def train_zero(job):
    fit(job)


@subject(
    name="deepspeed",
    backends=["fsdp"],
    precisions=["32", "16", "bf16"],
    capabilities=OF_ZERO,
    library="deepspeed",
    buffers="per-rank",
)
def train_stage_3(job):
    fit(job)


def settings(job):
    """Return what DeepSpeed's users write into ``ds_config.json``."""
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
        "steps_per_print": 10**9,
    }


def fit(job, backward=lambda engine, loss: engine.backward(loss)):
    deepspeed.init_distributed(job.comm)
    torch.manual_seed(job.seed + job.rank)
    model = job.model_with_loss()
    parameters = dict(model.model.named_parameters())
    optimizer = job.optimizer(model.parameters())
    with job.trial():  # ZeRO makes the optimizer's state by a step over gradients of zero
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=job.scheduler(optimizer), config=settings(job)
        )
    job.flat_parts(flat_parts(engine, parameters))
    sampler = DistributedSampler(job.dataset, shuffle=job.shuffle, seed=job.seed)
    loader = DataLoader(job.dataset, batch_size=job.batch_size, sampler=sampler)
    val_loader = DataLoader(job.val_dataset, batch_size=job.batch_size)
    progress = {"epoch": 0, "batches": 0}
    if job.resume:
        _, progress = engine.load_checkpoint(job.checkpoint_dir)
    for epoch in range(progress["epoch"], job.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2, dtype=torch.float64, device=engine.device)  # of the losses, and of the samples
        for number, batch in enumerate(loader):
            if epoch == progress["epoch"] and number < progress["batches"]:
                continue  # trained on before the interruption
            loss = engine(**batch.to(engine.device)).loss
            backward(engine, loss)
            stepped = engine.is_gradient_accumulation_boundary()
            scaler = getattr(engine.optimizer, "torch_autocast_gradscaler", None)  # ZeRO's, in float16
            scale = scaler.get_scale() if scaler else None
            engine.step()
            if stepped and scaler and not engine.was_step_applied():
                job.skipped(optimizer, scale)  # by a rule of its own, of which its GradScaler is not told
            sums += weighed(loss, batch)
            if stepped and engine.global_steps == job.stop_after_step:
                engine.save_checkpoint(job.checkpoint_dir, client_state={"epoch": epoch, "batches": number + 1})
                return
            if job.validate_every and (number + 1) % job.validate_every == 0:
                job.log("val_loss", evaluate(engine, val_loader))
        if sums.any():  # nothing is left of an epoch at whose end training was interrupted
            deepspeed.comm.all_reduce(sums)
            job.log("loss", sums[0] / sums[1])


@torch.no_grad()
def evaluate(engine, loader):
    """Return the mean loss of the held-out samples. Each rank has all of them: stage 3 gathers weights for each."""
    engine.eval()
    sums = 0
    for batch in loader:
        sums += weighed(engine(**batch.to(engine.device)).loss, batch)
    engine.train()
    return sums[0] / sums[1]


def weighed(loss, batch):
    """Return a batch's loss times its number of samples, and that number."""
    count = len(batch["index"])
    return torch.stack([loss.detach().double() * count, torch.tensor(float(count), device=loss.device)])


def flat_parts(engine, parameters):
    """Return this rank's part of each parameter; none where ZeRO does not divide them."""
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
    """Return what stages 1 and 2 say that this rank has of a parameter, in the flat tensor of its group."""
    if fragment is None:
        return FlatPart(flat, 0, 0, 0)
    low, high = fragment.lp_fragment_address, fragment.hp_fragment_address
    return FlatPart(flat, high.start, high.numel, low.start)


def of_stage_3(parameter, trained):
    """Return this rank's part of a parameter, of which each rank has as many entries; the last ones are padding."""
    flat, offset, size = (parameter.ds_tensor, 0, parameter.partition_numel()) if trained is None else trained[:3]
    begin = min(deepspeed.comm.get_rank() * size, parameter.ds_numel)
    return FlatPart(flat, offset, min(size, parameter.ds_numel - begin), begin)
