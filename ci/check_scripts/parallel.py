"""Published scripts that train on several ranks without a training library, and language models from scratch."""

from __future__ import annotations

from script import Script

TWO = "torchrun --standalone --nproc-per-node 2"


def picotron(kind: str, covers: str, **more: object) -> Script:
    """Return picotron's training with one kind of parallelism; its changes are for the CPU and Transformers 5."""
    settings: dict[str, object] = {
        "source": "huggingface/picotron",
        "also": ("train.py", "picotron"),
        "needs": ("flash_attn", "datasets", "wandb"),
        "data": ("llama", "texts", "picotron"),
        "changes": (
            ("picotron/data.py", r"tokenizer\.batch_encode_plus\(", "tokenizer("),
            ("picotron/utils.py", r"device='cuda'", "device='cpu'"),
            ("picotron/pipeline_parallel/pp_communications.py", r"torch\.cuda\.synchronize\(\)", "pass"),
            ("picotron/context_parallel/cp_communications.py", r"torch\.cuda\.synchronize\(\)", "pass"),
            ("picotron/model.py", r"config\.rope_theta", "10000.0"),
        ),
        "ranks": 2,
        **more,
    }
    command = f"torchrun --standalone --nproc-per-node 2 train.py --config {kind}.json"
    return Script(f"picotron {kind}", command, covers, **settings)  # type: ignore[arg-type]


NANOCHAT = (
    "-m scripts.base_train --device-type cpu --depth 2 --head-dim 32 --aspect-ratio 32 --max-seq-len 32 "
    "--device-batch-size 2 --total-batch-size 256 --num-iterations 4 --eval-every -1 --core-metric-every -1 "
    "--sample-every -1 --window-pattern L --warmup-steps 1"
)
NANOCHAT_NEEDS = ("tiktoken", "rustbpe", "wandb", "pyarrow")
LLAMA2C = (
    "train.py --device=cpu --compile=False --vocab_source=custom --vocab_size=64 --eval_iters=1 --batch_size=4 "
    "--max_seq_len=32 --dim=32 --n_layers=2 --n_heads=2 --n_kv_heads=2 --max_iters=4 --warmup_iters=2 --dropout=0.1"
)

GATE = r"if not verify_min_gpu_count\(min_gpus=_min_gpu_count\):"
ACCELERATOR = r"torch\.accelerator\.current_accelerator\(\)"


def distributed(folder: str, command: str, covers: str, **more: object) -> Script:
    """Return one of PyTorch's distributed examples, with changes for the CPU."""
    whole = f"distributed/{folder}"
    settings: dict[str, object] = {
        "name": f"pytorch {folder}".replace("_", "-"),
        "source": "pytorch/examples",
        "folder": whole,
        "also": (whole,),
        "ranks": 2,
        **more,
    }
    return Script(command=command, covers=covers, **settings)  # type: ignore[arg-type]


def tensor_parallel(name: str, covers: str, **more: object) -> Script:
    """Return one of PyTorch's tensor-parallel examples."""
    return distributed(
        "tensor_parallelism",
        f"{TWO} {name}.py",
        covers,
        **{
            "name": f"pytorch {name.replace('_', '-')}",
            "changes": (
                (f"{name}.py", GATE, "if False:"),
                (f"{name}.py", rf"{ACCELERATOR}\.type", "'cpu'"),
            ),
            "steps": 10,
            "accepted": ("not judged", "wrong"),
            "because": "zero_grad is never called, and ranks hold parts of the tensors",
            "is_wrong": True,
            **more,
        },
    )


PARALLEL = (
    distributed(
        "FSDP2",
        f"{TWO} example.py",
        "FSDP2 of a model on the meta device, clipping, the same batch on all ranks",
        changes=(("example.py", GATE, "if False:"), ("example.py", r", device_id=device", "")),
        steps=10,
        accepted=("wrong",),
        is_wrong=True,
        because="all ranks use the same seed, and reset_parameters skips layers after to_empty: NaN",
    ),
    distributed(
        "minGPT-ddp",
        f"{TWO} mingpt/main.py data_config.path=input.txt data_config.block_size=16 data_config.truncate=0.1 "
        "gpt_config.n_layer=2 gpt_config.n_head=2 gpt_config.n_embd=32 trainer_config.max_epochs=2 "
        "trainer_config.batch_size=64 trainer_config.data_loader_workers=0",
        "DDP in float16 with a loss scale",
        needs=("hydra", "boto3", "fsspec"),
        data=("shakespeare",),
        changes=(
            ("mingpt/main.py", GATE, "if False:"),
            ("mingpt/main.py", ACCELERATOR, "'cpu'"),
            ("mingpt/main.py", r"torch\.accelerator\.set_device_index\(rank\)", "pass"),
            ("mingpt/trainer.py", ACCELERATOR, "'cpu'"),
            ("mingpt/trainer.py", r"\.to\(self\.local_rank\)", ".to(self.device)"),
            ("mingpt/trainer.py", r"device_ids=\[self\.local_rank\]", "device_ids=None"),
        ),
        steps=10,
        accepted=("wrong",),
        is_wrong=True,
        because="gradients are clipped before scaler.unscale_, and each rank splits the dataset differently",
    ),
    distributed(
        "ddp-tutorial-series",
        f"{TWO} multigpu_torchrun.py --batch_size 256 2 10",
        "cross-entropy over a single class: every gradient is zero",
        changes=(
            ("multigpu_torchrun.py", r"torch\.cuda\.set_device\(.*\)", "pass"),
            ("multigpu_torchrun.py", "nccl", "gloo"),
            ("multigpu_torchrun.py", r"self\.gpu_id = int\(.*\)", "self.gpu_id = 'cpu'"),
            ("multigpu_torchrun.py", r"device_ids=\[self\.gpu_id\]", "device_ids=None"),
        ),
        steps=8,
        accepted=("not judged",),
        because="every gradient is zero",
        is_wrong=True,
    ),
    distributed(
        "ddp",
        f"{TWO} example.py",
        "DDP, one step only",
        changes=(
            ("example.py", GATE, "if False:"),
            ("example.py", ACCELERATOR, "'cpu'"),
            ("example.py", r"torch\.accelerator\.set_device_index\(rank\)", "pass"),
            ("example.py", r"\.to\(rank\)", ".to('cpu')"),
            ("example.py", r"device_ids=\[rank\]", "device_ids=None"),
        ),
        steps=1,
    ),
    tensor_parallel("tensor_parallel_example", "tensor parallelism by DTensor"),
    tensor_parallel("sequence_parallel_example", "sequence parallelism by DTensor"),
    picotron("dp", "hooks sum the gradients of all micro-batches separately, and reduce them in buckets"),
    picotron(
        "tp",
        "tensor parallelism by hand",
        accepted=("right in part",),
        because="Attention and MLP draw each rank's part from the same seed, so the parts are alike and stay alike",
    ),
    picotron("pp", "a pipeline by hand"),
    picotron(
        "cp",
        "ring attention over two halves of a sequence",
        accepted=("wrong",),
        is_wrong=True,
        because="train.py reduces gradients only if dp_size is above 1: with only cp_size 2, the ranks drift apart",
    ),
    Script(
        "nanochat",
        f"python {NANOCHAT}",
        "Muon and AdamW in one compiled optimizer, batches in reused buffers",
        "karpathy/nanochat",
        also=("nanochat", "scripts", "tasks"),
        needs=NANOCHAT_NEEDS,
        data=("nanochat",),
        environment={"NANOCHAT_BASE_DIR": "nanochat-data"},
        accepted=("right", "right in part"),
        because="a compiled step may round otherwise than a copy of it that is not compiled",
    ),
    Script(
        "nanochat of two ranks",
        f"{TWO} {NANOCHAT}",
        "an optimizer that averages gradients over ranks in its step, and shards its state",
        "karpathy/nanochat",
        also=("nanochat", "scripts", "tasks"),
        needs=NANOCHAT_NEEDS,
        data=("nanochat",),
        environment={"NANOCHAT_BASE_DIR": "nanochat-data"},
        changes=(
            (
                "nanochat/common.py",
                r"torch.device\(device_type\) # mps\|cpu",
                "torch.device(device_type); is_ddp_requested and dist.init_process_group('gloo')",
            ),
            ("nanochat/optim.py", r"\.get_future\(\)", ""),
        ),
        ranks=2,
        accepted=("not judged",),
        because="it is unknown how the optimizer's step combines the gradients of all ranks",
    ),
    *(
        Script(
            f"llm.c{name}",
            f"{TWO} train_gpt2.py --input_bin data/fineweb10B/fineweb_train_000001.bin --model d12 --device cpu "
            f"--batch_size 4 --sequence_length 32 --total_batch_size 512 --num_iterations 6 --grad_clip 1.0 "
            f"--zero_stage {stage} --write_tensors 0 --dtype float32",
            covers,
            "karpathy/llm.c",
            also=("train_gpt2.py",),
            needs=("tiktoken",),
            data=("fineweb",),
            changes=(
                ("train_gpt2.py", r"assert torch\.cuda\.is_available\(\), .*", "pass"),
                ("train_gpt2.py", r"device = f'cuda:\{ddp_local_rank\}'", "device = 'cpu'"),
                ("train_gpt2.py", r"torch\.cuda\.set_device\(device\)", "pass"),
                ("train_gpt2.py", "backend='nccl'", "backend='gloo'"),
                ("train_gpt2.py", r"device_ids=\[ddp_local_rank\]", "device_ids=None"),
                ("train_gpt2.py", r"tiktoken\.get_encoding\(.gpt2.\)", "None"),
                ("train_gpt2.py", "n_layer=12, n_head=12, n_embd=768", "n_layer=2, n_head=2, n_embd=32"),
            ),
            ranks=2,
        )
        for name, stage, covers in (
            ("", 0, "accumulation by require_backward_grad_sync, clipping, a schedule by hand"),
            (" zero 1", 1, "the same with ZeroRedundancyOptimizer, to which a group is added later"),
        )
    ),
    Script(
        "modded-nanogpt 2024",
        f"{TWO} train_gpt2.py",
        "Muon that divides matrices among ranks and sums their updates, beside three Adams",
        "KellerJordan/modded-nanogpt",
        also=("train_gpt2.py",),
        data=("fineweb",),
        environment={"TORCH_COMPILE_DISABLE": "1"},
        changes=(
            ("train_gpt2.py", r"device(_type)?='cuda'", r"device\1='cpu'"),
            ("train_gpt2.py", r"x\.cuda\(\), y\.cuda\(\)", "x, y"),
            ("train_gpt2.py", r"assert torch\.cuda\.is_available\(\)", "pass"),
            ("train_gpt2.py", "nccl", "gloo"),
            ("train_gpt2.py", r"f'cuda:\{ddp_local_rank\}'", "'cpu'"),
            ("train_gpt2.py", r"torch\.cuda\.(set_device\(device\)|synchronize\(\))", "pass"),
            ("train_gpt2.py", r"model = model\.cuda\(\)", "pass"),
            ("train_gpt2.py", r"device_ids=\[ddp_local_rank\]", "device_ids=None"),
            ("train_gpt2.py", r"\['nvidia-smi'\]", "['true']"),
            ("train_gpt2.py", r"enable_math_sdp\(False\)", "enable_math_sdp(True)"),
            ("train_gpt2.py", "n_layer=12, n_head=6, n_embd=768", "n_layer=2, n_head=2, n_embd=64"),
            ("train_gpt2.py", "num_vocab = 50304", "num_vocab = 1024"),
            ("train_gpt2.py", r"int = 8\*64", "int = 16"),
            ("train_gpt2.py", "device_batch_size : int = 64", "device_batch_size : int = 4"),
            ("train_gpt2.py", "sequence_length : int = 1024", "sequence_length : int = 32"),
            ("train_gpt2.py", "num_iterations : int = 3200", "num_iterations : int = 4"),
            ("train_gpt2.py", "warmdown_iters : int = 914", "warmdown_iters : int = 2"),
            ("train_gpt2.py", "val_tokens : int = 10485760", "val_tokens : int = 1024"),
        ),
        ranks=2,
        steps=16,
        accepted=("right", "right in part", "not judged"),
        because="gradients are divided by hand, and some are zero at first",
    ),
    Script(
        "llama2.c",
        f"python {LLAMA2C}",
        "a loss that the model keeps as an attribute",
        "karpathy/llama2.c",
        also=("train.py", "model.py", "configurator.py", "tinystories.py", "tokenizer.py", "export.py"),
        needs=("sentencepiece",),
        data=("tinystories",),
        steps=5,
    ),
    Script(
        "ng-video-lecture bigram",
        "python bigram.py",
        "an embedding alone, 3000 steps",
        "karpathy/ng-video-lecture",
        also=("bigram.py",),
        data=("shakespeare",),
        steps=3000,
    ),
)
