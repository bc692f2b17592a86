"""DeepSpeed: a training loop with its engine, with all stages of ZeRO."""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, DistributedSampler

from plumbline import FlatPart
from plumbline.subjects.declare import CAPABILITIES as EVERY
from plumbline.subjects.declare import subject
from plumbline.subjects.loop import weighted

import deepspeed  # isort: skip

# On a CPU its first process would compile a kernel, and its lock would remain if the process is killed meanwhile.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

STAGES = {"none": 0, "ddp": 0, "pp": 0, "zero": 1, "zero2": 2, "fsdp": 3}

CAPABILITIES = EVERY - {"several-optimizers", "sparse-gradients"}


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


# ZeRO averages the gradients that a rank has. If ranks use different parameters, it hangs or fails.
OF_ZERO = CAPABILITIES - {"unused-parameters"}


@subject(
    name="deepspeed",
    backends=["zero", "zero2", "fsdp"],
    precisions=["32", "16", "bf16"],
    capabilities=OF_ZERO,
    library="deepspeed",
    buffers="per-rank",
)
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
        "steps_per_print": 10**9,
    }


def fit(job, backward=lambda engine, loss: engine.backward(loss)):
    deepspeed.init_distributed(job.comm)
    torch.manual_seed(job.seed + job.rank)
    model = job.model_with_loss()
    parameters = dict(model.model.named_parameters())
    optimizer = job.optimizer(model.parameters())
    with job.trial():  # ZeRO creates the optimizer's state by a step with zero gradients
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
                job.skipped(optimizer, scale)  # DeepSpeed does not tell its GradScaler
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
    """Return this rank's part of each parameter; nothing if ZeRO does not divide them."""
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
    # Each rank has the same number of entries; the last ones are padding.
    flat, offset, size = (parameter.ds_tensor, 0, parameter.partition_numel()) if trained is None else trained[:3]
    begin = min(deepspeed.comm.get_rank() * size, parameter.ds_numel)
    return FlatPart(flat, offset, min(size, parameter.ds_numel - begin), begin)
