"""Published self-supervised trainings, on seeded pictures."""

from __future__ import annotations

from script import PICTURES, Script

TWO = "torchrun --standalone --nproc-per-node 2"


def crops(*sizes: int) -> str:
    """Return the source of a transform that cuts crops of these sizes out of a picture."""
    steps = "transforms.RandomCrop(size), transforms.RandomHorizontalFlip(), transforms.ToTensor()"
    return f"lambda one: [transforms.Compose([{steps}])(one) for size in {sizes}]"


def dino(name: str, options: str, covers: str, accepted: str, because: str) -> Script:
    """Return DINO's training in its first epoch, while the last layer is frozen."""
    return Script(
        name,
        f"{TWO} main_dino.py --arch vit_tiny --patch_size 8 --out_dim 64 --use_fp16 false --batch_size_per_gpu 8 "
        f"--epochs 1 --warmup_epochs 0 --local_crops_number 2 --data_path data --num_workers 0 {options}",
        covers,
        "facebookresearch/dino",
        also=("main_dino.py", "utils.py", "vision_transformer.py"),
        needs=PICTURES,
        changes=(
            ("main_dino.py", r"from PIL import .*", ""),
            ("utils.py", r"from PIL import .*", ""),
            ("main_dino.py", r"torch\.hub\.list\(.*?\)", "[]"),
            ("main_dino.py", r"DataAugmentationDINO\(\n(.*\n){3} +\)", crops(32, 32, 16, 16)),
            ("main_dino.py", r"\.cuda\((non_blocking=True)?\)", ""),
            ("main_dino.py", r"device_ids=\[args\.gpu\]", "device_ids=None"),
            ("main_dino.py", r"torch\.cuda\.synchronize\(\)", "pass"),
            ("utils.py", r"torch\.cuda\.set_device\(args\.gpu\)", "pass"),
            ("utils.py", r"device='cuda'", "device='cpu'"),
            ("utils.py", '"nccl"', '"gloo"'),
            ("vision_transformer.py", "embed_dim=192, depth=12", "embed_dim=48, depth=2"),
            ("vision_transformer.py", "hidden_dim=2048, bottleneck_dim=256", "hidden_dim=64, bottleneck_dim=32"),
        ),
        ranks=2,
        accepted=(accepted,),
        because=because,
    )


SELF_SUPERVISED = (
    Script(
        "barlow twins",
        "python main.py data --workers 0 --epochs 1 --batch-size 16 --projector 32-32-32",
        "a correlation matrix summed in place over ranks, without autograd; LARS; processes by spawn",
        "facebookresearch/barlowtwins",
        also=("main.py",),
        needs=PICTURES,
        changes=(
            ("main.py", r"from PIL import .*", ""),
            ("main.py", r"torch\.cuda\.device_count\(\)", "2"),
            ("main.py", "'nccl'", "'gloo'"),
            ("main.py", r"torch\.cuda\.set_device\(gpu\)", "pass"),
            ("main.py", r"torch\.backends\.cudnn\.benchmark = True", "torch.manual_seed(0)"),
            ("main.py", r"\.cuda\(gpu(, non_blocking=True)?\)", ""),
            ("main.py", r"model = nn\.SyncBatchNorm\.convert_sync_batchnorm\(model\)", "pass"),
            ("main.py", r"device_ids=\[gpu\]", "device_ids=None"),
            ("main.py", r", Transform\(\)", f", {crops(32, 32)}"),
            ("main.py", r"sizes = \[2048\]", "sizes = [16]"),
        ),
        ranks=2,
    ),
    dino(
        "dino",
        "--clip_grad 0",
        "a student of several crops and a teacher that follows it, a last layer that is frozen by removing gradients",
        "right in part",
        "gradients of the last layer are set to None in the first epoch: no step uses them",
    ),
    dino(
        "dino clipped",
        "--clip_grad 3",
        "each tensor's gradient is clipped by its own norm",
        "not judged",
        "the script clips with its own code, and the norm of a single tensor is recorded only to 18 %",
    ),
    Script(
        "dit",
        f"{TWO} train.py --data-path data --model DiT-S/8 --image-size 256 --num-classes 10 --epochs 1 "
        "--global-batch-size 16 --num-workers 0 --log-every 2",
        "diffusion with an average of the weights, layers that begin at zero, a chance to leave out the label",
        "facebookresearch/DiT",
        also=("train.py", "models.py", "diffusion"),
        needs=(*PICTURES, "timm"),
        changes=(
            ("train.py", r"from PIL import Image", ""),
            ("train.py", r"from diffusers.models import AutoencoderKL", ""),
            ("train.py", r"assert torch\.cuda\.is_available\(\).*", "pass"),
            ("train.py", '"nccl"', '"gloo"'),
            ("train.py", r"rank % torch\.cuda\.device_count\(\)", "'cpu'"),
            ("train.py", r"torch\.cuda\.(set_device\(device\)|synchronize\(\))", "pass"),
            ("train.py", r"device_ids=\[rank\]", "device_ids=None"),
            ("train.py", r"vae = AutoencoderKL.*", "pass"),
            ("train.py", r"vae\.encode\(x\)\.latent_dist\.sample\(\)", "torch.cat((x, x[:, :1]), 1)"),
            ("train.py", r"center_crop_arr\(pil_image, args\.image_size\)", "transforms.CenterCrop(32)(pil_image)"),
            ("models.py", "depth=12, hidden_size=384, patch_size=8", "depth=2, hidden_size=48, patch_size=8"),
        ),
        ranks=2,
    ),
    Script(
        "vq-vae-2",
        "python train_vqvae.py --n_gpu 2 --dist_url auto --size 32 --epoch 1 data",
        "codebooks that the forward sums over ranks and writes through .data; processes by spawn",
        "rosinality/vq-vae-2-pytorch",
        also=("train_vqvae.py", "vqvae.py", "scheduler.py", "distributed"),
        needs=PICTURES,
        changes=(
            ("train_vqvae.py", 'device = "cuda"', 'device = "cpu"'),
            ("train_vqvae.py", r"device_ids=.*\n *output_device=.*", ""),
            ("train_vqvae.py", "128 // args", "16 // args"),
            # rank 0 alone calls DDP to save pictures: its broadcast of buffers meets another collective of rank 1
            ("train_vqvae.py", "i % 100 == 0", "False"),
            ("train_vqvae.py", r"torch\.save\(.*", "pass"),
            ("distributed/distributed.py", '"cuda"', '"cpu"'),
            ("distributed/launch.py", r"if not torch\.cuda\.is_available\(\)", "if False"),
            ("distributed/launch.py", '"NCCL"', '"gloo"'),
            ("distributed/launch.py", r"torch\.cuda\.device_count\(\)", "2"),
            ("distributed/launch.py", r"torch\.cuda\.set_device\(local_rank\)", "pass"),
        ),
        ranks=2,
    ),
    Script(
        "mae",
        f"{TWO} main_pretrain.py --device cpu --data_path data --model mae_vit_base_patch16 "
        "--batch_size 4 --accum_iter 2 --epochs 1 --warmup_epochs 1 --num_workers 0 --no_pin_mem",
        "a random mask drawn in the forward, a loss over hidden patches, accumulation, a disabled loss scale",
        "facebookresearch/mae",
        also=("main_pretrain.py", "engine_pretrain.py", "models_mae.py", "util"),
        needs=(*PICTURES, "timm", "tensorboard"),
        changes=(
            ("util/misc.py", r"torch\.cuda\.set_device\(args\.gpu\)", "pass"),
            ("util/misc.py", "'nccl'", "'gloo'"),
            ("util/misc.py", r"from torch\._six import inf", "from math import inf"),
            ("util/misc.py", r"torch\.tensor\(x\)\.cuda\(\)", "torch.tensor(x)"),
            ("util/misc.py", r"device='cuda'", "device='cpu'"),
            ("util/pos_embed.py", r"np\.float\)", "float)"),
            ("main_pretrain.py", r"device_ids=\[args\.gpu\]", "device_ids=None"),
            ("main_pretrain.py", r", scale=\(0\.2, 1\.0\), interpolation=3", ""),
            ("engine_pretrain.py", r"torch\.cuda\.synchronize\(\)", "pass"),
            ("engine_pretrain.py", r"torch\.cuda\.amp\.autocast\(\)", "torch.autocast('cpu', torch.bfloat16)"),
            ("models_mae.py", "embed_dim=768, depth=12, num_heads=12", "embed_dim=64, depth=2, num_heads=2"),
            ("models_mae.py", r"embed_dim=512, decoder_depth=8(.*)heads=16", r"embed_dim=32, decoder_depth=1\1heads=2"),
        ),
        ranks=2,
    ),
)
