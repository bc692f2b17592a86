"""Published examples of training libraries: Accelerate, Lightning, Ignite, TRL and others."""

from __future__ import annotations

from script import PICTURES, Script

MOCKED = {"TESTING_MOCKED_DATALOADERS": "1"}
TWO = "--multi_gpu --num_processes 2 --main_process_port 0"
"""Options of ``accelerate launch``, with a free port, because several scripts may run at the same time."""

BERT = ("bert", "accuracy")
GAMES = ("gymnasium", "torchmetrics", "tensorboard")
PPO = "--total-timesteps 128 --num-steps 32 --per-rank-batch-size 32 --update-epochs 2"


def accelerated(file: str, covers: str, options: str = "", launch: str = TWO, **more: object) -> Script:
    """Return one of Accelerate's examples, on two processes."""
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


def lightning(path: str, command: str, covers: str, **more: object) -> Script:
    """Return one of Lightning's examples."""
    folder = f"examples/{path}"
    settings: dict[str, object] = {
        "name": f"lightning {path.rpartition('/')[2]}".replace("_", "-"),
        "source": "Lightning-AI/pytorch-lightning",
        "folder": folder,
        "also": (folder,),
        **more,
    }
    return Script(command=command, covers=covers, **settings)  # type: ignore[arg-type]


def trl(kind: str, dataset: str, covers: str, options: str = "", batch: int = 2, **more: object) -> Script:
    """Return a TRL trainer on a two-layer Llama."""
    command = (
        f"accelerate launch {TWO} trl/scripts/{kind}.py --model_name_or_path tiny-llama "
        f"--dataset_name {dataset} --output_dir out --use_cpu --max_steps 4 --per_device_train_batch_size {batch} "
        f"--report_to none --logging_steps 1 --bf16 false {options}"
    ).strip()
    settings: dict[str, object] = {
        "name": f"trl {kind}",
        "source": "huggingface/trl",
        "also": ("trl/scripts",),
        "needs": ("datasets", "trl", "peft"),
        "data": ("llama", "texts"),
        "ranks": 2,
        **more,
    }
    return Script(command=command, covers=covers, **settings)  # type: ignore[arg-type]


PEFT_SFT = (
    "accelerate launch --num_processes 2 --main_process_port 0 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy "
    "TRANSFORMER_BASED_WRAP train.py --model_name_or_path tiny-llama --dataset_name chats --splits train,test "
    "--chat_template_format chatml --dataset_text_field content --add_special_tokens False --append_concat_token False "
    "--max_length 64 --max_steps 4 --use_cpu --per_device_train_batch_size 2 --gradient_accumulation_steps 2 "
    "--max_grad_norm 1.0 --bf16 False --use_peft_lora True --lora_r 8 --lora_alpha 16 --lora_dropout 0.1 "
    "--lora_target_modules all-linear --gradient_checkpointing True --report_to none --output_dir out "
    "--save_strategy no"
)
FSDP_ON_THE_CPU = (
    "train.py",
    r"    set_seed\(training_args\.seed\)",
    "    set_seed(training_args.seed)\n"
    "    from accelerate.state import DistributedType, PartialState\n"
    "    PartialState._shared_state['distributed_type'] = DistributedType.MULTI_GPU",
)


def peft_sft(name: str, covers: str, *changes: tuple[str, str, str], **more: object) -> Script:
    """Return PEFT's example of fine-tuning with TRL under FSDP2, which Accelerate allows only on accelerators."""
    settings: dict[str, object] = {
        "folder": "examples/sft",
        "also": ("examples/sft",),
        "needs": ("datasets", "trl", "peft"),
        "data": ("llama", "texts"),
        "changes": (FSDP_ON_THE_CPU, *changes),
        "ranks": 2,
        **more,
    }
    return Script(name, PEFT_SFT, covers, "huggingface/peft", **settings)  # type: ignore[arg-type]


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
        accepted=("right in part",),
        because="the script also changes the weights between optimizer steps, and updates are not judged then",
    ),
    accelerated(
        "by_feature/ddp_comm_hook.py",
        "a DDP communication hook that rounds to float16",
        "--ddp_comm_hook fp16",
    ),
    accelerated(
        "by_feature/schedule_free.py",
        "an optimizer that is not from torch.optim",
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
        "complete_nlp_example.py",
        "all Accelerate features in one script",
        "--output_dir out",
        data=(*BERT, "glue"),
    ),
    accelerated(
        "by_feature/cross_validation.py",
        "trains three models one after another",
        data=(*BERT, "glue"),
        needs=("datasets", "evaluate", "sklearn"),
        environment={},
        steps=18,
        accepted=("right in part",),
        because="the second and the third model start after the recorded steps",
    ),
    accelerated("by_feature/profiler.py", "torch's profiler around every epoch"),
    lightning(
        "fabric/kfold_cv",
        "fabric run --main-port=29518 --accelerator=cpu --strategy=ddp --devices=2 train_fabric.py --epochs 1 "
        "--batch-size 4 --folds 2",
        "two models and two optimizers in turns",
        needs=(*PICTURES, "sklearn", "torchmetrics"),
        ranks=2,
        steps=8,
        accepted=("right in part",),
        because="the second model starts after the recorded steps",
    ),
    lightning(
        "fabric/reinforcement_learning",
        f"torchrun --standalone --nproc-per-node 2 train_torch.py {PPO} --share-data",
        "PPO: each rank trains on a share of the games of all ranks",
        needs=GAMES,
        ranks=2,
        steps=8,
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
        "processes spawned by idist, SyncBatchNorm requested, a disabled GradScaler",
        "pytorch/ignite",
        folder="examples/cifar10",
        also=("examples/cifar10",),
        needs=(*PICTURES, "fire"),
        environment={"MASTER_PORT": "2223"},  # Ignite's default is 2222, which another script may use at the same time
        ranks=2,
    ),
    trl("sft", "texts", "SFT with accumulation, packing off", "--gradient_accumulation_steps 2"),
    trl("dpo", "preferences", "DPO: a frozen reference model, two forwards per step"),
    trl("reward", "preferences", "a reward model: pairs in one batch"),
    trl("sft", "texts", "LoRA with dropout", "--use_peft --lora_dropout 0.1", name="trl sft lora"),
    trl("kto", "judgements", "KTO: a reference model, batches against their neighbours' completions", batch=4),
    trl(
        "grpo",
        "texts_with_prompts",
        "GRPO: the model draws completions, and rewards are compared within a group",
        "--reward_funcs rewards.letters --num_generations 2 --max_completion_length 8",
        data=("llama", "texts", "prompts"),
    ),
    Script(
        "peft olora",
        "python olora_finetuning.py --base_model tiny-llama --data_path instructions --device_map cpu --dtype float32 "
        "--batch_size 8 --seed 1",
        "LoRA whose first weights come from a QR decomposition, in a Trainer",
        "huggingface/peft",
        folder="examples/olora_finetuning",
        also=("examples/olora_finetuning",),
        needs=("datasets", "peft"),
        data=("llama", "texts"),
        steps=6,
    ),
    peft_sft("peft sft fsdp2", "LoRA under FSDP2, activation checkpointing with dropout, a fused head, clipping"),
    peft_sft(
        "peft sft fsdp2 with a trained head",
        "LoRA under FSDP2, and a head that is trained whole",
        ("utils.py", r'bias="none",', 'bias="none", modules_to_save=["lm_head"],'),
        accepted=("wrong",),
        is_wrong=True,
        because="TRL gathers the head's weight with full_tensor(), so each rank's part has the gradient of the rank's "
        "own samples: reports/findings/trl-head-is-trained-in-parts.md",
    ),
    Script(
        "ignite reinforce",
        "python reinforce.py --max-episodes 20",
        "REINFORCE: one backward pass through every step of an episode",
        "pytorch/ignite",
        folder="examples/reinforcement_learning",
        also=("examples/reinforcement_learning",),
        needs=("gymnasium",),
        steps=20,
    ),
    Script(
        "ignite actor-critic",
        "python actor_critic.py --max-episodes 20",
        "an actor and a critic in one network",
        "pytorch/ignite",
        folder="examples/reinforcement_learning",
        also=("examples/reinforcement_learning",),
        needs=("gymnasium",),
        steps=20,
    ),
    Script(
        "ignite siamese-network",
        "python siamese_network.py --epochs 1 --batch-size 16 --test-batch-size 16 --no-cuda",
        "a frozen backbone",
        "pytorch/ignite",
        folder="examples/siamese_network",
        also=("examples/siamese_network",),
        needs=PICTURES,
    ),
    Script(
        "schedule-free mnist",
        "python main.py --epochs 1 --batch-size 16",
        "an optimizer that swaps weights between training and evaluation",
        "facebookresearch/schedule_free",
        folder="examples/mnist",
        also=("examples/mnist",),
        needs=(*PICTURES, "schedulefree"),
    ),
    Script(
        "opacus mnist",
        "python mnist.py --device cpu --epochs 1 --batch-size 16",
        "differential privacy: gradients of samples are clipped and get noise",
        "pytorch/opacus",
        folder="examples",
        also=("examples/mnist.py",),
        needs=(*PICTURES, "opacus"),
        accepted=("not judged",),
        because="the optimizer makes its own gradients from those of single samples",
    ),
    Script(
        "cleanrl ppo",
        "python cleanrl/ppo.py --total-timesteps 512",
        "PPO: four epochs over the games, clipping by norm",
        "vwxyzjn/cleanrl",
        also=("cleanrl/ppo.py", "cleanrl_utils"),
        needs=("gymnasium", "tyro", "tensorboard"),
        steps=16,
    ),
    Script(
        "cleanrl dqn",
        "python cleanrl/dqn.py --total-timesteps 300 --learning-starts 200 --batch-size 32",
        "DQN: a target network, a replay buffer",
        "vwxyzjn/cleanrl",
        also=("cleanrl/dqn.py", "cleanrl_utils"),
        needs=("gymnasium", "tyro", "tensorboard"),
        environment={"PYTHONPATH": "."},
        steps=9,
    ),
    Script(
        "sam example",
        "python train.py --epochs 1 --batch_size 16 --depth 10 --width_factor 1 --threads 0",
        "SAM: two backward passes, at two points",
        "davda54/sam",
        folder="example",
        also=("example", "sam.py"),
        needs=PICTURES,
    ),
)
