"""Scripts from public repositories, as published. They are not kept here: the runner needs their checkouts.

Their licences allow running them; nothing of them is copied into this project.
"""

from __future__ import annotations

from in_parts import IN_PARTS
from libraries import LIBRARIES
from parallel import PARALLEL
from pictures import SELF_SUPERVISED
from script import PICTURES, Script
from teaching import TEACHING

COMMITS = {
    "ChinmayK0607/heiretsu": "bce9fb38a4e104ab77d2365547014d5194a4ae6c",
    "KellerJordan/modded-nanogpt": "e59ae87f884240fe637e45bc9b3f953954a6a79a",
    "Lightning-AI/pytorch-lightning": "7f0c3436cd3f6ad3753125672024fc415cbcb414",
    "NVIDIA/Megatron-LM": "d98e8a64ddf34856e74b24714e3bedb2f5a39553",
    "davda54/sam": "3c3afdbd71cff2462ec91c734b3d1170bd0f3707",
    "deepspeedai/DeepSpeedExamples": "45b4b7156c8794a3452a5a7d03dbd8d797068569",
    "eriklindernoren/PyTorch-GAN": "36d3c77e5ff20ebe0aeefd322326a134a279b93e",
    "facebookresearch/DiT": "ed81ce2229091fd4ecc9a223645f95cf379d582b",
    "facebookresearch/barlowtwins": "8e8d284ca0bc02f88b92328e53f9b901e86b4a3c",
    "facebookresearch/dino": "7c446df5b9f45747937fb0d72314eb9f7b66930a",
    "facebookresearch/dlrm": "090956ee2319ddd349a42232958aefccfe3f7b0a",
    "facebookresearch/mae": "efb2a8062c206524e35e47d04501ed4f544c0ae8",
    "facebookresearch/schedule_free": "70785b53e778d0e872c0bbb75ff4ee54ee10c291",
    "facebookresearch/vicreg": "4e12602fd495af83efd1631fbe82523e6db092e0",
    "huggingface/accelerate": "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
    "huggingface/peft": "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
    "huggingface/picotron": "59714b1bf25541dbeb6f5a721ed15f6d0768e786",
    "huggingface/trl": "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    "karpathy/llama2.c": "350e04fe35433e6d2941dce5a1f53308f87058eb",
    "karpathy/llm.c": "f1e2ace651495b74ae22d45d1723443fd00ecd3a",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "karpathy/nanochat": "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
    "karpathy/ng-video-lecture": "52201428ed7b46804849dea0b3ccf0de9df1a5c3",
    "kiankyars/micropp": "ccb99f47aea198762afa697a248e67032e669936",
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "pytorch/ignite": "de08e799cfb55a6cf4aa778575d6bad725385453",
    "pytorch/opacus": "4d0ebc84613d214fbfd37fbfd1390e3747a625ce",
    "pytorch/torchtitan": "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a",
    "rosinality/vq-vae-2-pytorch": "ef5f67c46f93624163776caec9e0d95063910eca",
    "shivangraval50/distributed-training-lab": "6ac3b7d309cffd97232b7cf953a7fe224d285dca",
    "vwxyzjn/cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "yunjey/pytorch-tutorial": "0500d3df5a2a8080ccfccbc00aca0eacc21818db",
}
"""The commit of each repository."""

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


def example(folder: str, command: str, covers: str, **more: object) -> Script:
    """Return one of PyTorch's examples."""
    settings: dict[str, object] = {"source": "pytorch/examples", "folder": folder, "also": (folder,), **more}
    return Script(f"pytorch {folder}".replace("_", "-"), command, covers, **settings)  # type: ignore[arg-type]


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
        "torch.compile with dropout",
        "karpathy/nanoGPT",
        also=("model.py", "train.py", "configurator.py"),
        data=("nanogpt",),
        steps=5,
    ),
    Script(
        "nanogpt compiled without dropout",
        f"python {NANOGPT.replace('--dropout=0.1', '--dropout=0.0')} --compile=True",
        "torch.compile: calls are replayed without compilation",
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
        "processes that share weights without a process group",
        needs=PICTURES,
        ranks=2,
        races=True,
        accepted=("right", "right in part"),
        because="an update is judged unless the other process writes to the weights meanwhile",
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
        accepted=("wrong",),
        is_wrong=True,
        because="main.py wraps the model in DDP only on an accelerator: on the CPU, each rank trains alone",
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
            accepted=("right",) if "optimizer" in options else ("not judged",),
            because="" if "optimizer" in options else "there is no optimizer",
        )
        for kind, options, covers in (
            ("LSTM", "--tied", "weights moved by hand, without an optimizer"),
            ("Transformer", "--use-optimizer --lr 0.01", "torch.optim, clipping by norm"),
            ("GRU", "--tied --use-optimizer --lr 0.01", "tied weights, hidden state over batches"),
        )
    ),
    example(
        "gat",
        "python main.py --no-accel --epochs 4 --num-heads 2",
        "attention over a graph in one full batch",
        data=("cora",),
    ),
    example(
        "time_sequence_prediction",
        "python train.py --steps 2",
        "LBFGS: many closures per step, float64",
        needs=("matplotlib",),
        data=("sines",),
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
        steps=2,
        accepted=("right in part",),
        because="LBFGS evaluates the loss several times per step, so its update is not replayed",
    ),
    *LIBRARIES,
    *PARALLEL,
    *IN_PARTS,
    *SELF_SUPERVISED,
    *TEACHING,
)
