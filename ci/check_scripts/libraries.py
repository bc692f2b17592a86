"""Examples of the libraries that train: Accelerate, Lightning, Ignite and TRL, as they were published."""

from __future__ import annotations

from script import PICTURES, Script

MOCKED = {"TESTING_MOCKED_DATALOADERS": "1"}
TWO = "--multi_gpu --num_processes 2 --main_process_port 0"
"""Options of ``accelerate launch``, with a free port, since several scripts may run at a time."""

BERT = ("bert", "accuracy")


def accelerated(file: str, covers: str, options: str = "", launch: str = TWO, **more: object) -> Script:
    """Return an example of Accelerate, on two processes."""
    name = f"accelerate {file.removesuffix('.py').rpartition('/')[2].replace('_', '-')}"
    ranks = 2 if launch == TWO else 1
    settings: dict[str, object] = {
        "name": name,
        "source": "huggingface/accelerate",
        "also": ("examples", "tests/test_samples"),
        "folder": ".",
        "needs": ("datasets", "evaluate"),
        "data": BERT,
        "environment": MOCKED,
        "ranks": ranks,
        "steps": 4 if ranks == 2 else 6,
        **more,
    }
    command = f"accelerate launch {launch} examples/{file} --cpu {options}".strip()
    return Script(command=command, covers=covers, **settings)  # type: ignore[arg-type]


def lightning(name: str, command: str, covers: str, **more: object) -> Script:
    """Return one of Lightning's examples."""
    folder = f"examples/{name}"
    settings: dict[str, object] = {
        "source": "Lightning-AI/pytorch-lightning",
        "folder": folder,
        "also": (folder,),
        **more,
    }
    return Script(f"lightning {name.rpartition('/')[2]}".replace("_", "-"), command, covers, **settings)  # type: ignore[arg-type]


def trl(name: str, data: str, covers: str, options: str = "", **more: object) -> Script:
    """Return a trainer of TRL, on a Llama of two layers."""
    command = (
        f"accelerate launch {TWO} trl/scripts/{name}.py --model_name_or_path tiny-llama "
        f"--dataset_name {data} --output_dir out --use_cpu --max_steps 4 --per_device_train_batch_size 2 "
        f"--report_to none --logging_steps 1 --bf16 false {options}"
    ).strip()
    settings: dict[str, object] = {
        "source": "huggingface/trl",
        "also": ("trl/scripts",),
        "needs": ("datasets", "trl", "peft"),
        "data": ("llama", "texts"),
        "ranks": 2,
        **more,
    }
    return Script(f"trl {name}", command, covers, **settings)  # type: ignore[arg-type]


LIBRARIES = (
    accelerated("by_feature/gradient_accumulation.py", "accumulate()", "--gradient_accumulation_steps 2"),
    accelerated(
        "by_feature/gradient_accumulation.py",
        "accumulate() in bf16",
        "--gradient_accumulation_steps 2 --mixed_precision bf16",
        name="accelerate gradient-accumulation bf16",
    ),
    accelerated("by_feature/automatic_gradient_accumulation.py", "find_executable_batch_size"),
    accelerated(
        "by_feature/checkpointing.py", "checkpoints between epochs", "--checkpointing_steps epoch --output_dir out"
    ),
    accelerated(
        "by_feature/local_sgd.py",
        "LocalSGD: weights averaged every few steps",
        "--local_sgd_steps 2",
        accepted=("not judged",),
        because="each rank is meant to step with its own gradients",
    ),
    accelerated(
        "by_feature/ddp_comm_hook.py",
        "a DDP communication hook that rounds to float16",
        "--ddp_comm_hook fp16",
    ),
    accelerated(
        "by_feature/schedule_free.py",
        "an optimizer that is not of torch.optim",
        needs=("schedulefree", "datasets", "evaluate"),
    ),
    accelerated("by_feature/early_stopping.py", "set_trigger", launch="--cpu --num_processes 1", data=(*BERT, "glue")),
    accelerated(
        "by_feature/gradient_accumulation_for_autoregressive_models.py",
        "loss over all tokens of the accumulated batches",
        "--gradient_accumulation_steps 2",
        data=("llama", "accuracy"),
    ),
    accelerated(
        "nlp_example.py",
        "linear warm-up, BERT with dropout, batches of unequal length",
        data=(*BERT, "glue"),
        environment={},
        steps=9,
    ),
    accelerated(
        "complete_nlp_example.py", "everything of Accelerate in one script", "--output_dir out", data=(*BERT, "glue")
    ),
    lightning(
        "fabric/image_classifier",
        "fabric run --accelerator=cpu --strategy=ddp --devices=2 train_fabric.py --epochs 1 --batch-size 8",
        "Fabric, started by fabric run",
        needs=PICTURES,
        ranks=2,
    ),
    lightning(
        "fabric/dcgan",
        "python train_fabric.py",
        "Fabric, two optimizers",
        needs=PICTURES,
        environment={"CHECK_SCRIPTS_SAMPLES": "8"},
        steps=5,
    ),
    lightning("pytorch/bug_report", "python bug_report_model.py", "Lightning, one step only", steps=1),
    lightning(
        "pytorch/basics",
        "python autoencoder.py --trainer.accelerator cpu --trainer.max_epochs 1 --trainer.limit_train_batches 5 "
        "--trainer.limit_val_batches 1 --trainer.limit_test_batches 1 --trainer.limit_predict_batches 1",
        "LightningCLI",
        needs=(*PICTURES, "jsonargparse"),
        environment={"CHECK_SCRIPTS_SAMPLES": "60000"},
    ),
    Script(
        "ignite mnist",
        "python mnist.py --epochs 1 --batch_size 16 --val_batch_size 16",
        "create_supervised_trainer",
        "pytorch/ignite",
        folder="examples/mnist",
        also=("examples/mnist",),
        needs=PICTURES,
    ),
    Script(
        "ignite dcgan",
        "python dcgan.py --dataset cifar10 --dataroot . --epochs 1 --batch-size 16 --workers 0 --g-filters 8 "
        "--d-filters 8 --no-cuda --seed 1 --output-dir out",
        "an Engine with two optimizers",
        "pytorch/ignite",
        folder="examples/gan",
        also=("examples/gan",),
        needs=PICTURES,
    ),
    Script(
        "ignite cifar10",
        "python main.py run --backend gloo --nproc_per_node 2 --num_epochs 1 --batch_size 16 --num_workers 0 "
        "--num_warmup_epochs 0 --data_path data --output_path out",
        "processes that idist spawns, SyncBatchNorm asked for, GradScaler that is switched off",
        "pytorch/ignite",
        folder="examples/cifar10",
        also=("examples/cifar10",),
        needs=(*PICTURES, "fire"),
        environment={"MASTER_PORT": "2223"},  # 2222 is Ignite's own, which another script may use at the same time
        ranks=2,
    ),
    trl("sft", "texts", "SFT with accumulation, packing off", "--gradient_accumulation_steps 2"),
    trl("dpo", "preferences", "DPO: a frozen reference model, two forwards a step"),
    trl("reward", "preferences", "a reward model: pairs in one batch"),
)
