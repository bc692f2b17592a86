"""Published trainings whose ranks hold parts of a model or of its state, or whose losses gather over ranks."""

from __future__ import annotations

from script import Script

TORCHRUN = "torchrun --standalone --nproc-per-node"

FILE = "run_simple_mcore_train_loop.py"
"""Megatron's example training loop, which the changes below modify."""

ON_THE_CPU = (
    (FILE, r"(?m)^import torch$", "import torch\nimport cpu_for_cuda"),
    (FILE, r"torch\.cuda\.set_device\(local_rank\)", "pass"),
    (FILE, '"nccl"', '"gloo"'),
    (FILE, r'torch\.device\("cuda"\)', 'torch.device("cpu")'),
    (FILE, r"compile_helpers\(\)\n", "pass\n"),
)
OWN_OPTIMIZER = (
    (
        FILE,
        r"optim: Adam = Adam\(gpt_model\.parameters\(\)\)",
        "from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer\n"
        "    optim = get_megatron_optimizer(OptimizerConfig(lr=1e-3, clip_grad=0.0), [gpt_model])",
    ),
    (FILE, r"optim\.zero_grad\(\)", "gpt_model.zero_grad_buffer(), optim.zero_grad()"),
)

DISTRIBUTED_OPTIMIZER = (
    (FILE, r"tensor_model_parallel_size=2", "tensor_model_parallel_size=1"),
    (FILE, r"use_distributed_optimizer=False", "use_distributed_optimizer=True"),
    (
        FILE,
        r"batch_size=8, shuffle=True",
        "batch_size=8, sampler=torch.utils.data.distributed.DistributedSampler(datasets[0])",
    ),
    *(
        (file, pattern, text.replace("clip_grad=0.0", "clip_grad=0.0, use_distributed_optimizer=True"))
        for file, pattern, text in OWN_OPTIMIZER
    ),
)

OF_PARTS = (
    *DISTRIBUTED_OPTIMIZER[1:2],
    (
        FILE,
        r"batch_size=8, shuffle=True",
        "batch_size=8, sampler=torch.utils.data.distributed.DistributedSampler(datasets[0], "
        "parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank())",
    ),
    *DISTRIBUTED_OPTIMIZER[3:],
)

IN_BFLOAT16 = (
    *OF_PARTS,
    (
        FILE,
        r"pipeline_dtype=torch\.float32,",
        "pipeline_dtype=torch.bfloat16, bf16=True, params_dtype=torch.bfloat16,",
    ),
    (FILE, r"gpt_model\.to\(device\)", "gpt_model = gpt_model.to(device).bfloat16()"),
    (
        FILE,
        r"clip_grad=0\.0,",
        "clip_grad=0.05, bf16=True, params_dtype=torch.bfloat16,",
    ),
    (FILE, r"grad_reduce_in_fp32=False", "grad_reduce_in_fp32=True"),
)

IN_STAGES = (
    *IN_BFLOAT16,
    (FILE, r"size=2, pipeline_model_parallel_size=1", "size=1, pipeline_model_parallel_size=2"),
    (FILE, r"use_cpu_initialization=True,", "use_cpu_initialization=True, pipeline_model_parallel_size=2,"),
    (
        FILE,
        r"max_sequence_length=_SEQUENCE_LENGTH,",
        "max_sequence_length=_SEQUENCE_LENGTH, share_embeddings_and_output_weights=True, "
        "pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),",
    ),
    (FILE, r"num_microbatches=1", "num_microbatches=2"),
    (FILE, r"micro_batch_size=8", "micro_batch_size=4"),
    (FILE, r"batch_size=8, sampler", "batch_size=4, sampler"),
)


def megatron(name: str, covers: str, more_changes: tuple[tuple[str, str, str], ...] = (), **more: object) -> Script:
    """Return Megatron's example training loop, which needs megatron-core."""
    settings: dict[str, object] = {
        "source": "NVIDIA/Megatron-LM",
        "folder": "examples",
        "also": (f"examples/{FILE}",),
        "needs": ("megatron.core.datasets.helpers_cpp", "cpu_for_cuda"),
        "changes": (*ON_THE_CPU, *more_changes),
        "ranks": 2,
        "steps": 5,
        **more,
    }
    return Script(name, f"{TORCHRUN} {settings['ranks']} {FILE}", covers, **settings)  # type: ignore[arg-type]


def torchtitan(name: str, ranks: int, options: str, covers: str, model: str = "llama3") -> Script:
    """Return a training of the installed torchtitan's debug model; the repository has its tokenizer."""
    return Script(
        f"torchtitan {name}",
        f"{TORCHRUN} {ranks} -m torchtitan_on_cpu --module {model} --config {model}_debugmodel --debug.seed 42 "
        "--training.local_batch_size 2 --training.seq_len 32 --training.steps 4 --training.disable_cuda_graphs "
        "--training.mixed_precision_param float32 --parallelism.spmd_backend partial_dtensor --checkpoint.interval 100 "
        f"--validator.freq 100 {options}",
        covers,
        "pytorch/torchtitan",
        also=("tests/assets/tokenizer",),
        needs=("torchtitan", "triton", "torchtitan_on_cpu"),
        data=("c4",),
        is_adapted=True,
        ranks=ranks,
    )


def cifar(stage: int) -> Script:
    """Return DeepSpeed's CIFAR-10 example with a stage of ZeRO."""
    file = "cifar10_deepspeed.py"
    return Script(
        f"deepspeed cifar zero {stage}",
        f"{TORCHRUN} 2 {file} --epochs 1 --dtype fp32 --stage {stage}",
        f"ZeRO {stage}, clipping, a schedule that begins at 0",
        "deepspeedai/DeepSpeedExamples",
        folder="training/cifar",
        also=(f"training/cifar/{file}",),
        needs=("deepspeed", "torchvision"),
        environment={"DS_ACCELERATOR": "cpu"},
        changes=(
            (
                file,
                r"(?m)^import torchvision$",
                'import sys; sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None\nimport torchvision',
            ),
            (file, r'"lr": 0\.001,', '"lr": 0.001, "torch_adam": True,'),
        ),
        ranks=2,
    )


def heiretsu(kind: str, options: str, covers: str, because: str) -> Script:
    """Return heiretsu's training with one kind of parallelism; all of them are wrong as published."""
    return Script(
        f"heiretsu {kind}",
        f"{TORCHRUN} 2 train.py --dist_backend gloo --device cpu --data_dir chunks --batch_size 2 --block_size 16 "
        f"--n_layer 2 --n_head 2 --n_embed 16 --dropout 0 --max_iters 5 --eval_iters 1 {options}",
        covers,
        "ChinmayK0607/heiretsu",
        also=("train.py", "gpt_model.py", "moe.py", "ep_comm.py", "tp_linear.py", "pipeline.py", "topo.py", "dp.py"),
        needs=("einops",),
        data=("chunks",),
        changes=(("gpt_model.py", "vocab_size: int = 50257", "vocab_size: int = 401"),),
        ranks=2,
        steps=5,
        accepted=("wrong",),
        is_wrong=True,
        because=because,
    )


TWO_VIEWS = (
    "lambda one: tuple(T.Compose([T.RandomCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])(one) for _ in 'xy')"
)

IN_PARTS = (
    megatron(
        "megatron-core loop",
        "megatron-core 0.19.2: tensor parallelism by its layers, its DistributedDataParallel, torch's Adam",
        accepted=("wrong",),
        is_wrong=True,
        because="Megatron's DistributedDataParallel keeps gradients in main_grad, which torch's Adam does not read: no "
        "weight moves",
    ),
    megatron(
        "megatron-core", "megatron-core 0.19.2: tensor parallelism by its layers, and its own optimizer", OWN_OPTIMIZER
    ),
    megatron(
        "megatron-core distributed optimizer",
        "megatron-core 0.19.2: data parallelism, each rank updates its shard of every parameter",
        DISTRIBUTED_OPTIMIZER,
    ),
    megatron(
        "megatron-core distributed optimizer of parts",
        "megatron-core 0.19.2: tensor and data parallelism on 2 × 2, each rank updates its shard of its parts",
        OF_PARTS,
        ranks=4,
    ),
    megatron(
        "megatron-core bfloat16",
        "megatron-core 0.19.2: the same in bfloat16 with float32 copies of the weights, and clipping",
        IN_BFLOAT16,
        ranks=4,
    ),
    megatron(
        "megatron-core pipeline",
        "megatron-core 0.19.2: two stages with tied embeddings and data parallelism, the rest as before",
        IN_STAGES,
        ranks=4,
    ),
    torchtitan(
        "fsdp", 2, "--parallelism.data_parallel_shard_degree 2", "torchtitan 0.3.0: FSDP2 that sums, a loss in chunks"
    ),
    torchtitan(
        "fsdp and tp",
        4,
        "--parallelism.data_parallel_shard_degree 2 --parallelism.tensor_parallel_degree 2",
        "torchtitan 0.3.0: FSDP2 and tensor parallelism on a mesh of 2 × 2",
    ),
    torchtitan(
        "hsdp",
        4,
        "--parallelism.data_parallel_shard_degree 2 --parallelism.data_parallel_replicate_degree 2",
        "torchtitan 0.3.0: shards on two ranks, replicated twice",
    ),
    torchtitan(
        "pp",
        2,
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B",
        "torchtitan 0.3.0: a pipeline of two stages, each with a norm of its own",
    ),
    torchtitan(
        "cp",
        2,
        "--parallelism.context_parallel_degree 2 --training.seq_len 256 --training.local_batch_size 1",
        "torchtitan 0.3.0: sequences on two ranks, flex attention over gathered keys",
    ),
    torchtitan(
        "ep",
        2,
        "--parallelism.data_parallel_shard_degree 2 --parallelism.expert_parallel_degree 2",
        "torchtitan 0.3.0: DeepSeek's experts on two ranks, FSDP2 for the rest",
        model="deepseek_v3",
    ),
    *(cifar(stage) for stage in (1, 2, 3)),
    Script(
        "vicreg",
        f"{TORCHRUN} 2 main_vicreg.py --device cpu --data-dir data --exp-dir exp --arch resnet34 --mlp 32-32-32 "
        "--batch-size 16 --epochs 1 --num-workers 0",
        "a loss over the features of all ranks, gathered by a function of its own, LARS",
        "facebookresearch/vicreg",
        also=("main_vicreg.py", "distributed.py", "resnet.py"),
        needs=("torchvision",),
        changes=(
            ("main_vicreg.py", "import augmentations as aug", "import torchvision.transforms as T"),
            ("main_vicreg.py", r"aug\.TrainTransform\(\)", TWO_VIEWS),
            ("main_vicreg.py", "pin_memory=True", "pin_memory=False"),
            ("main_vicreg.py", r"\.cuda\(gpu(, non_blocking=True)?\)", ""),
            ("main_vicreg.py", r"model = nn\.SyncBatchNorm\.convert_sync_batchnorm\(model\)", "pass"),
            ("main_vicreg.py", r", device_ids=\[gpu\]", ""),
            ("main_vicreg.py", r"torch\.backends\.cudnn\.benchmark = True", "torch.manual_seed(0)"),
            ("distributed.py", r"torch\.cuda\.set_device\(args\.gpu\)", "pass"),
            ("distributed.py", "'nccl'", "'gloo'"),
        ),
        ranks=2,
    ),
    heiretsu(
        "ep",
        "--ep 2 --num_experts 4",
        "experts on two ranks, whose tokens plain all-to-alls exchange",
        "all_to_all_single has no gradient, so none reaches the experts",
    ),
    heiretsu(
        "pp",
        "--pp 2 --grad_accum_steps 2 --grad_clip 0.5",
        "a pipeline by hand, all forwards before all backwards",
        "each stage clips by the norm of its own gradients",
    ),
    Script(
        "dlrm",
        f"{TORCHRUN} 2 dlrm_s_pytorch.py --arch-sparse-feature-size=8 --arch-mlp-bot=13-16-8 --arch-mlp-top=16-8-1 "
        "--arch-embedding-size=20-20-20-20 --data-generation=random --num-batches=5 --mini-batch-size=8 --nepochs=1 "
        "--loss-function=bce --round-targets=True --num-indices-per-lookup=3 --dist-backend=gloo",
        "embedding tables on two ranks, an exchange in two functions, DistributedDataParallel around the rest",
        "facebookresearch/dlrm",
        also=(
            *("dlrm_s_pytorch.py", "dlrm_data_pytorch.py", "data_loader_terabyte.py", "data_utils.py"),
            *("extend_distributed.py", "mlperf_logger.py", "optim", "tricks"),
        ),
        needs=("sklearn", "tensorboard"),
        ranks=2,
        steps=5,
        accepted=("wrong",),
        is_wrong=True,
        because="gradients of tables are added up over the losses of both ranks, those of other layers are averaged",
    ),
    Script(
        "micropp",
        f"{TORCHRUN} 2 main.py",
        "a pipeline by hand in the order 1F1B, whose activations are sent without waiting",
        "kiankyars/micropp",
        folder="src",
        also=("src",),
        ranks=2,
        steps=50,
    ),
)
