"""Scripts of our own, in the style of users: each shows one thing that trainings do."""

from __future__ import annotations

from script import Script

TWO = "torchrun --standalone --nproc-per-node 2"
FOUR = "torchrun --standalone --nproc-per-node 4"


def alone(name: str, covers: str, **more: object) -> Script:
    """Return a script with a single process, started by Python."""
    return Script(name.replace("_", "-"), f"python {name}.py", covers, **more)  # type: ignore[arg-type]


def two(name: str, covers: str, **more: object) -> Script:
    """Return a script with two ranks, started by torchrun."""
    return Script(name.replace("_", "-"), f"{TWO} {name}.py", covers, ranks=2, **more)  # type: ignore[arg-type]


REWRITTEN_SCRIPTS = (
    alone("plain_loop", "plain loop, no group, momentum, StepLR", steps=6),
    two("ddp", "DDP, sampler, clipping by norm, cosine schedule", steps=12),
    two(
        "ddp_accumulation_amp",
        "no_sync accumulation, fp16 autocast, GradScaler, clipping, schedule, BatchNorm",
        steps=4,
    ),
    alone("bf16_clip_value", "bf16 autocast, clipping by value, parameter groups, accumulation", steps=5),
    alone("fp16_scaler_overflow", "GradScaler that skips steps", steps=14),
    alone("gan_spawn", "mp.spawn, GAN, two optimizers, spectral_norm", ranks=2, steps=8),
    two("ema_teacher", "EMA copy as a teacher", steps=5),
    two("checkpointed", "activation checkpointing, dropout, clipping"),
    two("compiled", "torch.compile inside DDP", steps=5),
    two("tied_frozen", "tied and frozen weights, ignore_index"),
    two(
        "unused_branches",
        "unused parameters, find_unused_parameters",
        steps=5,
        accepted=("right in part",),
        because="no sample takes one of the branches in the recorded steps",
    ),
    two("sparse_embedding", "sparse gradients, two optimizers in one step", steps=8),
    alone("lightning_ddp", "Lightning: DDP, accumulation, clipping, bf16-mixed", ranks=2, needs=("lightning",)),
    alone("lightning_manual_gan", "Lightning: manual optimization, two optimizers", steps=8, needs=("lightning",)),
    alone("fabric_loop", "Fabric: no_backward_sync, clip_gradients", ranks=2, steps=4, needs=("lightning",)),
    Script(
        "accelerate-loop",
        "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 accelerate_loop.py",
        "Accelerate: accumulate, clipping, unequal lengths",
        ranks=2,
        needs=("accelerate",),
    ),
    two(
        "trainer_llama",
        "Transformers Trainer: accumulation, unequal token counts",
        needs=("transformers", "accelerate"),
    ),
    alone("ignite_engine", "Ignite: idist.Parallel, accumulation", ranks=2, needs=("ignite",)),
    two("fsdp2", "FSDP2: blocks in shards, accumulation, clipping"),
    two("fsdp2_bf16", "FSDP2 with parameters and reduction in bf16"),
    Script("hsdp", f"{FOUR} hsdp.py", "HSDP on a 2 × 2 mesh, bf16 parameters", ranks=4),
    two("zero_redundancy", "ZeroRedundancyOptimizer"),
    Script(
        "deepspeed-zero",
        "deepspeed --num_accelerators 2 --master_port 29617 deepspeed_zero.py",
        "DeepSpeed ZeRO 2, accumulation, clipping",
        needs=("deepspeed",),
        ranks=2,
    ),
    Script(
        "deepspeed-zero float16",
        "deepspeed --num_accelerators 2 --master_port 29615 deepspeed_zero.py",
        "DeepSpeed ZeRO 2 in float16, with a loss scaler of its own",
        needs=("deepspeed",),
        environment={"FLOAT16": "1"},
        ranks=2,
    ),
    Script(
        "deepspeed experts",
        "deepspeed --num_accelerators 4 --master_port 29619 deepspeed_experts.py",
        "DeepSpeed's experts in bfloat16 with ZeRO 2: copies that get their gradients in two steps, clipping",
        needs=("deepspeed",),
        ranks=4,
        steps=3,
        accepted=("right", "right in part"),
        because="in bfloat16 the gradient of an expert's bias may be too small to tell from rounding",
    ),
    Script(
        "deepspeed pipeline",
        "deepspeed --num_accelerators 4 --master_port 29621 deepspeed_pipeline.py",
        "DeepSpeed's pipeline engine on 2 × 2",
        needs=("deepspeed",),
        ranks=4,
    ),
    Script(
        "deepspeed pipeline bfloat16",
        "deepspeed --num_accelerators 4 --master_port 29622 deepspeed_pipeline.py",
        "DeepSpeed's pipeline engine on 2 × 2 in bfloat16, with clipped gradients",
        environment={"DTYPE": "bfloat16"},
        needs=("deepspeed",),
        ranks=4,
    ),
    Script(
        "srun-ddp",
        "srun --nodes 2 --ntasks-per-node 1 python srun_ddp.py",
        "DDP started by srun",
        needs=("slurm",),
        ranks=2,
    ),
    two("all_reduce_by_hand", "gradients averaged by hand"),
    two("contrastive", "a loss over the features of all ranks"),
    two("experts", "experts over all_to_all, clipping", steps=5),
    two("ulysses", "sequence parallelism by all_to_all, clipping", steps=5),
    alone("half_compiled", "half of the model compiled, with dropout"),
    alone("gradient_penalty", "double backward"),
    alone("two_heads", "two backward passes, a dict as output"),
    alone(
        "sharpness_aware",
        "SAM: weights move between two passes",
        accepted=("right in part",),
        because="the subtraction that moves weights back rounds, and updates of weights that change are not judged",
    ),
    two("own_optimizer", "a user's own optimizer, a parameter as an output"),
    two("diffusion", "randomness drawn inside the forward, AveragedModel"),
    alone("global_counter", "a forward that is not a function of its inputs"),
    alone(
        "float64_lbfgs",
        "LBFGS closures in float64",
        accepted=("right in part",),
        because="LBFGS evaluates the loss several times per step, so its update is not replayed",
    ),
    alone("data_parallel", "nn.DataParallel, weight_norm, a learning rate set by hand"),
)
