"""Scripts from public repositories, as they were published: their checkouts are given to the runner, not kept here.

Their licences allow to run them; nothing of them is copied into this project.
"""

from __future__ import annotations

from script import Script

COMMITS = {
    "Lightning-AI/pytorch-lightning": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "huggingface/accelerate": "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    "huggingface/trl": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "pytorch/ignite": "de08e799cfb55a6cf4aa778575d6bad725385453",
}
"""The commit of each repository."""

PICTURES = ("torchvision",)
NANOGPT = (
    "train.py --device=cpu --dataset=shakespeare_char --eval_interval=1000 --eval_iters=1 --block_size=32 "
    "--batch_size=4 --n_layer=2 --n_head=2 --n_embd=64 --dropout=0.1 --max_iters=4 --gradient_accumulation_steps=8 "
    "--warmup_iters=2"
)
TO_CPU = (
    ("train.py", r"f'cuda:\{ddp_local_rank\}'", "'cpu'"),
    ("train.py", r"torch\.cuda\.set_device\(device\)", "pass"),
    ("train.py", r"device_ids=\[ddp_local_rank\]", "device_ids=None"),
)
IMAGENET_OF_TWO = (
    "torchrun --standalone --nproc-per-node 2 main.py --dummy --no-accel --workers 0 --arch resnet18 --seed 1 "
    "--dist-url env:// --dist-backend gloo"
)
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


def example(folder: str, command: str, covers: str, **more: object) -> Script:
    """Return one of PyTorch's examples."""
    settings: dict[str, object] = {"source": "pytorch/examples", "folder": folder, "also": (folder,), **more}
    return Script(f"pytorch {folder}".replace("_", "-"), command, covers, **settings)  # type: ignore[arg-type]


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


PUBLISHED = (
    Script(
        "nanogpt",
        f"python {NANOGPT} --compile=False",
        "accumulation, clipping, AdamW in groups, dropout, tied weights, schedule by hand",
        "karpathy/nanoGPT",
        also=("model.py", "train.py", "configurator.py"),
        data=("nanogpt",),
        steps=5,
    ),
    Script(
        "nanogpt compiled",
        f"python {NANOGPT} --compile=True",
        "torch.compile with dropout: compiled code draws its own random numbers, so no call can be run again",
        "karpathy/nanoGPT",
        also=("model.py", "train.py", "configurator.py"),
        data=("nanogpt",),
        steps=5,
    ),
    Script(
        "nanogpt compiled without dropout",
        f"python {NANOGPT.replace('--dropout=0.1', '--dropout=0.0')} --compile=True",
        "torch.compile: calls are run again uncompiled",
        "karpathy/nanoGPT",
        also=("model.py", "train.py", "configurator.py"),
        data=("nanogpt",),
        steps=5,
    ),
    Script(
        "nanogpt ddp",
        f"torchrun --standalone --nproc-per-node 2 {NANOGPT} --compile=False --backend=gloo",
        "DDP, require_backward_grad_sync",
        "karpathy/nanoGPT",
        also=("model.py", "train.py", "configurator.py"),
        data=("nanogpt",),
        changes=TO_CPU,
        ranks=2,
        steps=5,
    ),
    Script(
        "mingpt adder",
        "python projects/adder/adder.py --trainer.max_iters=5 --trainer.num_workers=0 --trainer.device=cpu "
        "--data.ndigit=1",
        "a Trainer class with callbacks, evaluation between steps",
        "karpathy/minGPT",
        also=("mingpt", "projects"),
        environment={"PYTHONPATH": "."},
        steps=5,
    ),
    *(
        Script(
            f"makemore {kind}",
            f"python makemore.py --type {kind} --max-steps 5 --num-workers 0 --device cpu",
            covers,
            "karpathy/makemore",
            also=("makemore.py", "names.txt"),
            needs=("tensorboard",),
            steps=6,
        )
        for kind, covers in (
            ("transformer", "plain loop, AdamW"),
            ("gru", "a recurrent network: one module called many times in a forward"),
            ("mlp", "an embedding used by hand"),
            ("bigram", "a bare nn.Parameter as the whole model"),
        )
    ),
    example(
        "mnist", "python main.py --no-accel --epochs 1 --batch-size 16", "dropout, Adadelta, StepLR", needs=PICTURES
    ),
    example("mnist_rnn", "python main.py --epochs 1 --batch-size 16", "LSTM", needs=PICTURES),
    example(
        "mnist_hogwild",
        "python main.py --epochs 1 --batch-size 16",
        "processes that share weights without a group",
        needs=PICTURES,
        ranks=2,
    ),
    example(
        "mnist_forward_forward",
        "python main.py --no_accel --epochs 2 --train_size 32 --test_size 16",
        "an optimizer per layer, forwards on detached inputs",
        needs=PICTURES,
    ),
    example(
        "vae", "python main.py --no-accel --epochs 1 --batch-size 16", "noise drawn in the forward", needs=PICTURES
    ),
    example(
        "dcgan",
        "python main.py --dataset fake --niter 1 --batchSize 16 --workers 0 --ngf 8 --ndf 8 --manualSeed 1",
        "GAN: two models, two optimizers, gradients of two backwards",
        needs=PICTURES,
    ),
    example(
        "siamese_network",
        "python main.py --no-accel --epochs 1 --batch-size 16",
        "one network called twice, BatchNorm, Adadelta",
        needs=PICTURES,
    ),
    example(
        "imagenet",
        "python main.py --dummy --no-accel --epochs 1 --batch-size 16 --workers 0 --arch resnet18 --seed 1",
        "BatchNorm, SGD with momentum, StepLR",
        needs=PICTURES,
    ),
    Script(
        "pytorch imagenet distributed",
        f"{IMAGENET_OF_TWO} --epochs 1 --batch-size 8",
        "two ranks on CPU",
        "pytorch/examples",
        folder="imagenet",
        also=("imagenet",),
        needs=PICTURES,
        ranks=2,
        expected="wrong",
        because="main.py wraps the model in DDP on an accelerator only: on the CPU each rank trains alone",
    ),
    Script(
        "pytorch imagenet ddp",
        f"{IMAGENET_OF_TWO} --epochs 3 --batch-size 4",
        "DistributedSampler over several epochs, DDP with BatchNorm",
        "pytorch/examples",
        folder="imagenet",
        also=("imagenet",),
        needs=PICTURES,
        environment={"CHECK_SCRIPTS_SAMPLES": "32"},
        changes=(("main.py", r"print\('using CPU.*", "model = torch.nn.parallel.DistributedDataParallel(model)"),),
        ranks=2,
        steps=12,
    ),
    *(
        Script(
            f"pytorch word-language-model {kind}",
            f"python main.py --model {kind} --epochs 1 --batch_size 4 --emsize 32 --nhid 32 --bptt 20 {options}",
            covers,
            "pytorch/examples",
            folder="word_language_model",
            also=("word_language_model/main.py", "word_language_model/model.py", "word_language_model/data.py"),
            data=("wikitext",),
            steps=9,
            expected="right" if "optimizer" in options else "not judged",
            because="" if "optimizer" in options else "there is no optimizer",
        )
        for kind, options, covers in (
            ("LSTM", "--tied", "weights moved by hand, without an optimizer"),
            ("Transformer", "--use-optimizer --lr 0.01", "torch.optim, clipping by norm"),
            ("GRU", "--tied --use-optimizer --lr 0.01", "tied weights, hidden state over batches"),
        )
    ),
    example(
        "time_sequence_prediction",
        "python train.py --steps 2",
        "LBFGS: many closures in a step, float64",
        needs=("matplotlib",),
        data=("sines",),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        steps=2,
    ),
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
        expected="not judged",
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
