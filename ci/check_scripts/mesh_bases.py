"""Right trainings on several ranks, into which ``mesh_mistakes.py`` puts mistakes.

Most are scripts of public repositories, with changes for the CPU and smaller sizes. Three of them are wrong as
published; ``because`` says what was repaired. Experts and Ulysses are scripts of our own.
"""

from __future__ import annotations

from parallel import ACCELERATOR, GATE, picotron
from rewritten import REWRITTEN_SCRIPTS
from script import Script

FOUR = "torchrun --standalone --nproc-per-node 4"
TWO = "torchrun --standalone --nproc-per-node 2"
Change = tuple[str, str, str]


def lab(kind: str, covers: str, *changes: tuple[str, str], options: str = "--n-layer 2") -> Script:
    """Return a training of the distributed-training-lab."""
    file = f"train_{kind}.py"
    return Script(
        f"lab {kind}" if not changes else f"lab {kind}, {covers}",
        f"{TWO} {file} --steps 5 --batch-size 8 --block-size 16 --d-model 32 --n-head 2 {options}",
        covers,
        "shivangraval50/distributed-training-lab",
        also=(file, "src"),
        changes=tuple((file, *change) for change in changes),
        ranks=2,
        steps=5,
    )


FSDP1 = lab("fsdp", "FullyShardedDataParallel")
TP = lab("tp", "tensor parallelism by DTensor")
GPIPE = lab("pp", "GPipe", options="--n-layer 2 --microbatches 4")


def several_stages(schedule: str, places: str, last: int) -> Script:
    """Return the pipeline with two stages per rank; ``places`` are a rank's stages, and ``last`` computes the loss."""
    return lab(
        "pp",
        schedule,
        ("ScheduleGPipe", schedule),
        (
            r"stage_module = build_pp_stage_module\(full_model, rank, world_size\)\.to\(device\)",
            f"places = {places}; parts = [build_pp_stage_module(full_model, i, 4) for i in places]; "
            "stage_module = nn.ModuleList(parts)",
        ),
        (
            r"stage = PipelineStage\(.*\)",
            "stage = [PipelineStage(part, stage_index=i, num_stages=4, device=device) "
            "for part, i in zip(parts, places)]",
        ),
        (r"is_last = rank == world_size - 1", f"is_last = rank == {last}"),
        options="--n-layer 4 --microbatches 4",
    )


ONE_F_ONE_B = lab("pp", "Schedule1F1B", ("ScheduleGPipe", "Schedule1F1B"), options="--n-layer 2 --microbatches 4")
LOOPED, IN_V = "(rank, rank + 2)", "(rank, 3 - rank)"
INTERLEAVED = several_stages("ScheduleInterleaved1F1B", LOOPED, 1)
SCHEDULES = (
    ONE_F_ONE_B,
    INTERLEAVED,
    several_stages("ScheduleLoopedBFS", LOOPED, 1),
    several_stages("ScheduleInterleavedZeroBubble", LOOPED, 1),
    several_stages("ScheduleZBVZeroBubble", IN_V, 0),
    several_stages("ScheduleDualPipeV", IN_V, 0),
)
ZERO_BUBBLE = SCHEDULES[3]


def pytorch(file: str, ranks: int, covers: str, *changes: tuple[str, str], also: tuple[Change, ...] = ()) -> Script:
    """Return one of PyTorch's examples of tensor parallelism, with the missing ``zero_grad``."""
    settings: dict[str, object] = {
        "folder": "distributed/tensor_parallelism",
        "also": ("distributed/tensor_parallelism",),
        "changes": (
            (file, GATE, "if False:"),
            (file, rf"{ACCELERATOR}\.type", "'cpu'"),
            (file, r"foreach=True", "foreach=False"),
            (file, r"( +)(output\.sum\(\)\.backward\(\)\n)", r"\1optimizer.zero_grad()\n\1\2"),
            *((file, *change) for change in changes),
            *also,
        ),
        "ranks": ranks,
        "steps": 10,
        "because": "zero_grad was never called",
    }
    command = f"torchrun --standalone --nproc-per-node {ranks} {file}"
    return Script(f"pytorch {file[:-3]}", command, covers, "pytorch/examples", **settings)  # type: ignore[arg-type]


SMALL_LLAMA = (
    (r"dim=256, n_layers=2, n_heads=16, vocab_size=32000", "dim=32, n_layers=1, n_heads=4, vocab_size=64"),
    (r"torch\.randint\(32000, \(8, 256\)", "torch.randint(64, (4, 8)"),
    (r"output\.sum\(\)\.backward", "F.cross_entropy(output.flatten(0, 1), inp.flatten()).backward"),
    (r"num_iterations = 10", "num_iterations = 5"),
)
OWN_ATTENTION = (
    "llama2_model.py",
    r"F\.scaled_dot_product_attention\(xq, xk, xv, is_causal=True\)",
    "(xq @ xk.transpose(-2, -1) / xq.shape[-1] ** 0.5).softmax(-1) @ xv",
)
SEQUENCE = pytorch(
    "sequence_parallel_example.py",
    2,
    "sequence parallelism by DTensor",
    (r"output\.sum\(\)", "output.square().sum()"),
)
FSDP_TP = pytorch(
    "fsdp_tp_example.py",
    4,
    "FSDP2 with tensor and sequence parallelism",
    *SMALL_LLAMA,
    also=(OWN_ATTENTION,),  # DTensor does not support flash attention on the CPU
)

FSDP2_CHANGES = (
    ("example.py", GATE, "if False:"),
    ("example.py", r", device_id=device", ""),
    ("example.py", r"n_layers=10", "n_layers=2"),
    ("example.py", r"vocab_size = 1024", "vocab_size = 64"),
    ("example.py", r"batch_size = 32", "batch_size = 4"),
    ("example.py", r"range\(10\)", "range(5)"),
    ("example.py", r'with torch\.device\("meta"\):', "if True:"),
    ("example.py", r"        model\.to_empty\(device=device\)\n        model\.reset_parameters\(\)", "        pass"),
    ("example.py", r"( +)(optim = )", r"\1torch.manual_seed(1 + rank)\n\1\2"),
    ("example.py", r"model\(x\)\.sum\(\)", "torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())"),
    ("example.py", r"lr=1e-2", "lr=1e-3"),
)


def fsdp2(name: str, launcher: str, ranks: int, covers: str, *changes: Change) -> Script:
    """Return PyTorch's FSDP2 example, with initialized weights and different batches on each rank."""
    return Script(
        name,
        f"{launcher} example.py",
        covers,
        "pytorch/examples",
        folder="distributed/FSDP2",
        also=("distributed/FSDP2",),
        changes=(*FSDP2_CHANGES, *changes),
        ranks=ranks,
        steps=5,
        because="all ranks used the same batches, and reset_parameters skipped layers",
    )


FSDP2 = fsdp2("pytorch FSDP2 example", TWO, 2, "FSDP2, clipping")
HSDP = fsdp2(
    "pytorch FSDP2 example as HSDP",
    FOUR,
    4,
    "HSDP on a 2 × 2 mesh, clipping",
    ("example.py", r"from utils import .*", "inspect_model = inspect_mixed_precision = lambda model: None"),
    (
        "example.py",
        r"fsdp_kwargs = \{\}",
        'fsdp_kwargs = {"mesh": torch.distributed.init_device_mesh'
        '("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}',
    ),
)


def mended_picotron(kind: str, covers: str, *changes: Change, **more: object) -> Script:
    """Return picotron's training, repaired or on another mesh."""
    base = picotron(kind, covers)
    settings: dict[str, object] = {"accepted": ("right",), "is_wrong": False, "because": "", **more}
    return picotron(kind, covers, changes=(*base.changes, *changes), **settings)


PICOTRON_TP = mended_picotron(
    "tp",
    "tensor parallelism by hand",
    ("train.py", r"( +)(with init_model_with_dem)", r"\1set_all_seed(7 + pgm.process_group_manager.tp_rank)\n\1\2"),
    because="each rank drew the same part of every layer",
)
PICOTRON_PP = mended_picotron("pp", "a pipeline by hand")
PICOTRON_CP = mended_picotron(
    "cp",
    "ring attention over two halves of a sequence",
    (
        "train.py",
        r"if pgm\.process_group_manager\.dp_world_size > 1",
        "if pgm.process_group_manager.cp_dp_world_size > 1",
    ),
    because="gradients were reduced only if dp_size is above 1",
)


def on_four(kind: str, covers: str) -> Script:
    """Return picotron's training with data parallelism and another parallelism on a 2 × 2 mesh."""
    base = {"tp": PICOTRON_TP, "pp": PICOTRON_PP, "cp": PICOTRON_CP}[kind]
    return Script(
        f"picotron dp × {kind}",
        f"{FOUR} train.py --config {kind}.json",
        covers,
        base.source,
        also=base.also,
        needs=base.needs,
        data=base.data,
        changes=(
            *base.changes,
            ("train.py", r"( +)(config = json\.load\(f\))", r'\1\2\n\1config["distributed"]["dp_size"] = 2'),
        ),
        ranks=4,
        steps=4,
    )


DP_CP = on_four("cp", "data and context parallelism")
DP_PP = on_four("pp", "data parallelism and a pipeline")


def zero(stage: int) -> Script:
    """Return a DeepSpeed training with a stage of ZeRO."""
    return Script(
        f"deepspeed-zero {stage}",
        f"deepspeed --num_accelerators 2 --master_port {29630 + stage} deepspeed_zero.py",
        f"DeepSpeed ZeRO {stage}, accumulation, clipping",
        needs=("deepspeed",),
        environment={"STAGE": str(stage)},
        ranks=2,
    )


def cifar(stage: int) -> Script:
    """Return DeepSpeed's CIFAR-10 example."""
    return Script(
        f"DeepSpeedExamples cifar ZeRO {stage}",
        "deepspeed --num_accelerators 2 --master_port 29618 cifar10_deepspeed.py --dtype fp32 "
        f"--stage {stage} --epochs 1",
        f"DeepSpeed ZeRO {stage}, clipping, its own loader",
        "deepspeedai/DeepSpeedExamples",
        folder="training/cifar",
        also=("training/cifar/cifar10_deepspeed.py",),
        needs=("deepspeed", "torchvision"),
        changes=(
            ("cifar10_deepspeed.py", r'("betas": )', r'"torch_adam": True, \1'),
            (
                "cifar10_deepspeed.py",
                r"( +)# Initialize DeepSpeed distributed backend\.\n",
                r'\1import sys; sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None\n',
            ),
            ("cifar10_deepspeed.py", r'"steps_per_print"', '"zero_force_ds_cpu_optimizer": False, "steps_per_print"'),
            ("cifar10_deepspeed.py", r'"warmup_num_steps": 1000', '"warmup_num_steps": 2'),
        ),
        ranks=2,
    )


OWN = {one.name: one for one in REWRITTEN_SCRIPTS}
EXPERTS, ULYSSES, CONTRASTIVE = (OWN[name] for name in ("experts", "ulysses", "contrastive"))

VICREG = Script(
    "vicreg",
    f"{TWO} main_vicreg.py --data-dir . --exp-dir exp --arch resnet34 --mlp 32-32 --batch-size 16 --epochs 2 "
    "--num-workers 0 --device cpu --base-lr 0.3",
    "a loss over the features of all ranks, gathered by a custom function",
    "facebookresearch/vicreg",
    also=("main_vicreg.py", "distributed.py"),
    changes=(
        ("distributed.py", r"torch\.cuda\.set_device\(args\.gpu\)", "pass"),
        ("distributed.py", r"'nccl'", "'gloo'"),
        ("main_vicreg.py", r"import augmentations as aug\n", ""),
        ("main_vicreg.py", r"import resnet\n", ""),
        ("main_vicreg.py", r"import torchvision\.datasets as datasets\n", ""),
        ("main_vicreg.py", r"transforms = aug\.TrainTransform\(\)", "drawn = torch.randn(64, 2, 24)"),
        (
            "main_vicreg.py",
            r"datasets\.ImageFolder\(.*\)",
            "[((one[0], 0.7 * one[0] + 0.7 * one[1]), 0) for one in drawn]",
        ),
        ("main_vicreg.py", r"    gpu = torch\.device", "    torch.manual_seed(0)\n    gpu = torch.device"),
        ("main_vicreg.py", r"pin_memory=True", "pin_memory=False"),
        ("main_vicreg.py", r"\.cuda\(gpu(, non_blocking=True)?\)", ".to(gpu)"),
        ("main_vicreg.py", r"    model = nn\.SyncBatchNorm.*\n", ""),
        ("main_vicreg.py", r"device_ids=\[gpu\]", "device_ids=None"),
        ("main_vicreg.py", r"torch\.cuda\.amp\.GradScaler\(\)", "torch.amp.GradScaler('cpu', enabled=False)"),
        ("main_vicreg.py", r"torch\.cuda\.amp\.autocast\(\)", "torch.autocast('cpu', enabled=False)"),
        (
            "main_vicreg.py",
            r"resnet\.__dict__\[args\.arch\]\(\n.*\n +\)",
            "(nn.Sequential(nn.Linear(24, 32), nn.ReLU()), 32)",
        ),
        ("main_vicreg.py", r"warmup_steps = 10 \*", "warmup_steps = 1 *"),
    ),
    ranks=2,
)
BASES = (
    *(FSDP1, TP, GPIPE, *SCHEDULES, SEQUENCE, FSDP_TP, FSDP2, HSDP),
    *(PICOTRON_TP, PICOTRON_PP, PICOTRON_CP, DP_CP, DP_PP),
    *(zero(1), zero(2), zero(3), cifar(1), cifar(2), EXPERTS, ULYSSES, VICREG, CONTRASTIVE),
)
