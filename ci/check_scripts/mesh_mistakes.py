"""Mistakes in parallel code from public trackers: each is a small change of a right training.

``causes`` are those whose sentence says what a maintainer would call the mistake. They were written down before any
verdict was seen. Later, causes were added that were made for a mistake, or that say the same in other words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mesh_bases import (
    CONTRASTIVE,
    DP_CP,
    DP_PP,
    EXPERTS,
    FSDP1,
    FSDP2,
    FSDP_TP,
    GPIPE,
    HSDP,
    INTERLEAVED,
    ONE_F_ONE_B,
    PICOTRON_CP,
    PICOTRON_PP,
    PICOTRON_TP,
    SEQUENCE,
    TP,
    ULYSSES,
    VICREG,
    ZERO_BUBBLE,
    cifar,
    zero,
)
from script import Script


@dataclass(frozen=True)
class MeshMistake:
    """A mistake in one training.

    Attributes:
        parallelism: the kind of parallelism.
        name: its name in the tables.
        tracker: the issues that report it.
        base: the right training.
        changes: patterns and replacements, with the file of each.
        causes: the causes that name it.
    """

    parallelism: str
    name: str
    tracker: str
    base: Script
    changes: tuple[tuple[str, str, str], ...]
    causes: tuple[str, ...]

    @property
    def script(self) -> Script:
        """The wrong training."""
        return replace(
            self.base,
            name=f"{self.name} in {self.base.name}",
            changes=(*self.base.changes, *self.changes),
            accepted=("wrong",),
            is_wrong=True,
            because=self.tracker,
        )


Changes = tuple[tuple[str, str], ...]


def in_file(file: str, *changes: tuple[str, str]) -> tuple[tuple[str, str, str], ...]:
    """Return changes of a single file."""
    return tuple((file, *one) for one in changes)


def before_step(file: str, *statements: str, step: str = r"optimizer\.step\(\)") -> tuple[tuple[str, str, str], ...]:
    """Return the change that executes statements before each step of the optimizer."""
    lines = "".join(rf"\1{one}\n" for one in statements)
    return ((file, rf"(?m)^( +)({step}\n)", rf"{lines}\1\2"),)


FSDP_LAB, TP_LAB, PP_LAB, TORCH_TP = "train_fsdp.py", "train_tp.py", "train_pp.py", "fsdp_tp_example.py"
TP_COMM = "picotron/tensor_parallel/tp_communications.py"
TP_LAYERS = "picotron/tensor_parallel/tensor_parallel.py"
CP_FILE = "picotron/context_parallel/context_parallel.py"
PP_FILE = "picotron/pipeline_parallel/pipeline_parallel.py"
DP_FILE = "picotron/data_parallel/data_parallel.py"

FSDP1_MISTAKES = (
    MeshMistake(
        "FSDP1",
        "clipped by nn.utils.clip_grad_norm_, on each rank by the norm of its shards",
        "pytorch#72548, OpenDiloco#6",
        FSDP1,
        before_step(FSDP_LAB, "nn.utils.clip_grad_norm_(fsdp_model.parameters(), 0.1)"),
        ("clipped-shard-by-shard",),
    ),
    MeshMistake(
        "FSDP1",
        "gradients divided by the number of ranks again",
        "transformers#46775 (FSDP's own division is overlooked)",
        FSDP1,
        before_step(FSDP_LAB, "for p in fsdp_model.parameters(): p.grad.div_(world_size)"),
        ("averaged-twice",),
    ),
    MeshMistake(
        "FSDP1",
        "all ranks draw the same batches",
        "pytorch-lightning#15734",
        FSDP1,
        in_file(
            FSDP_LAB,
            (r"make_rank_shard\(full_data, rank, world_size\)", "make_rank_shard(full_data, 0, world_size)"),
            (r"manual_seed\(args\.seed \+ rank\)", "manual_seed(args.seed)"),
        ),
        ("ranks-alike", "no-sampler"),
    ),
    MeshMistake(
        "FSDP1",
        "the optimizer is created before FSDP wraps the model",
        "accelerate#807, pytorch FSDP's documentation",
        FSDP1,
        in_file(
            FSDP_LAB,
            (r"    optimizer = torch\.optim\.AdamW\(fsdp_model\.parameters\(\), lr=args\.lr\)\n", ""),
            (r"( +)(fsdp_model = FSDP\()", r"\1optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)\n\1\2"),
        ),
        ("optimizer-holds-other-parameters",),
    ),
)

OWN_NORM = (
    "parts = [p.grad.to_local() for p in model.parameters()]; "
    "norm = torch.cat([g.flatten() for g in parts]).norm(); [g.mul_((0.1 / (norm + 1e-6)).clamp(max=1)) for g in parts]"
)
REPLICAS_AGAIN = (
    "total = sum(p.grad.to_local().norm() ** 2 for p in model.parameters()); torch.distributed.all_reduce(total); "
    "torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total.sqrt())"
)
CLIP = r"torch\.nn\.utils\.clip_grad_norm_\(model\.parameters\(\), max_norm=1\.0\)"

FSDP2_MISTAKES = (
    MeshMistake(
        "FSDP2, HSDP",
        "clipped by hand, on each rank by the norm of its shards",
        "pytorch#170862, RLinf#1558",
        FSDP2,
        in_file("example.py", (CLIP, OWN_NORM)),
        ("clipped-shard-by-shard",),
    ),
    MeshMistake(
        "FSDP2, HSDP",
        "the all-reduce over replicas is switched off, and never on again",
        "cosmos-framework#162",
        HSDP,
        in_file("example.py", (r"( +)(inspect_model\(model\)\n)", r"\1model.set_requires_all_reduce(False)\n\1\2")),
        ("averaged-over-some-ranks", "not-synchronised", "reduction-switched-off"),
    ),
    MeshMistake(
        "FSDP2, HSDP",
        "the norm counts each replica again",
        "VeOmni#184",
        HSDP,
        in_file("example.py", (CLIP, REPLICAS_AGAIN)),
        ("clipped-to-another-length", "counted-again-in-the-norm"),
    ),
    MeshMistake(
        "FSDP2, HSDP",
        "gradients are summed over ranks: FSDP's division is switched off, and nothing else divides",
        "torchtitan#2206, Megatron-LM#5956",
        FSDP2,
        before_step("example.py", "for p in model.parameters(): p.grad.mul_(2)", step=r"torch\.nn\.utils\.clip.*"),
        ("summed-over-ranks",),
    ),
)

ZERO_FILE, CIFAR_FILE = "deepspeed_zero.py", "cifar10_deepspeed.py"
LOCAL_NORM = (
    "import deepspeed.runtime.zero.stage_1_and_2 as zero; "
    "zero.DeepSpeedZeroOptimizer.get_grad_norm_direct = "
    "lambda self, gradients, params, norm_type=2: torch.stack([g.norm() for g in gradients]).norm()"
)
NEVER_REDUCED = (
    "import deepspeed.runtime.zero.stage_1_and_2 as zero; "
    "zero.DeepSpeedZeroOptimizer.average_tensor = lambda self, tensor, *rest: None"
)

ZERO_MISTAKES = (
    MeshMistake(
        "ZeRO",
        "several backward passes before each step, although DeepSpeed takes each as the last",
        "open-instruct#1498",
        zero(2),
        in_file(
            ZERO_FILE,
            (r'"gradient_accumulation_steps": 2', '"gradient_accumulation_steps": 1'),
            (
                r"engine\.backward\(loss\)\n +engine\.step\(\)",
                "engine.backward(loss / 2)\n        if batch % 2: engine.step()",
            ),
        ),
        ("only-last-micro-batch",),
    ),
    MeshMistake(
        "ZeRO",
        "each rank clips by the norm of its own partition",
        "DeepSpeed#5241 (norms of ZeRO), RLinf#1558",
        cifar(1),
        in_file(
            CIFAR_FILE,
            (r"(    ds_config = get_ds_config\(args\)\n)", rf"\1    {LOCAL_NORM}\n"),
            (r'"gradient_clipping": 1\.0', '"gradient_clipping": 0.1'),
        ),
        ("clipped-shard-by-shard",),
    ),
    MeshMistake(
        "ZeRO",
        "gradients are never averaged over ranks",
        "DeepSpeed#545, verl#7493",
        zero(2),
        in_file(ZERO_FILE, (r"(    engine, \*_ = )", rf"    {NEVER_REDUCED}\n\1")),
        ("not-synchronised",),
    ),
    MeshMistake(
        "ZeRO",
        "all ranks draw the same batches",
        "pytorch-lightning#15734",
        zero(3),
        in_file(ZERO_FILE, (r"manual_seed\(40 \+ rank\)", "manual_seed(40)")),
        ("ranks-alike", "no-sampler"),
    ),
    MeshMistake(
        "ZeRO",
        "a division by the number of ranks is left out, so gradients are sums",
        "DeepSpeed#5248 (the division is always off)",
        cifar(2),
        in_file(
            CIFAR_FILE,
            (r'"gradient_clipping": 1\.0', '"gradient_clipping": 0.0'),
            (
                r"(            model_engine\.step\(\)\n)",
                r"            [g.mul_(2) for gs in optimizer.averaged_gradients.values() for g in gs]\n\1",
            ),
        ),
        ("summed-over-ranks",),
    ),
)

SHARDS_AVERAGED = (
    "for p in tp_model.parameters(): "
    "g = p.grad.to_local() if hasattr(p.grad, 'to_local') else p.grad; dist.all_reduce(g); g /= world_size"
)
COUNTED_PER_RANK = (
    "total = sum((p.grad.to_local() if hasattr(p.grad, 'to_local') else p.grad).norm() ** 2 "
    "for p in tp_model.parameters()); dist.all_reduce(total); "
    "[nn.utils.clip_grads_with_norm_([p], 0.1, total.sqrt()) for p in tp_model.parameters()]"
)
DP_SEED = r"torch\.manual_seed\(i \+ dp_rank\)"

TP_MISTAKES = (
    MeshMistake(
        "tensor parallelism by DTensor",
        "shards of different ranks are averaged like the gradients of replicas",
        "DeepSpeed#7199, transformers#43105 (data parallelism over a tensor-parallel group)",
        TP,
        before_step(TP_LAB, SHARDS_AVERAGED),
        ("blocks-averaged-with-each-other",),
    ),
    MeshMistake(
        "tensor parallelism by DTensor",
        "the norm counts replicated gradients once per rank",
        "NeMo-RL#3788",
        TP,
        before_step(TP_LAB, COUNTED_PER_RANK),
        ("clipped-to-another-length", "counted-again-in-the-norm"),
    ),
    MeshMistake(
        "tensor parallelism by DTensor",
        "ranks of one tensor-parallel group draw different batches",
        "DeepSpeed#7199, torchtitan#49",
        TP,
        in_file(TP_LAB, (r"manual_seed\(args\.seed \+ 1\)", "manual_seed(args.seed + 1 + rank)")),
        ("replica-of-different-samples",),
    ),
    MeshMistake(
        "tensor parallelism by DTensor",
        "replicated parameters, of which each rank has the whole gradient, are summed over ranks",
        "transformers#45994, gpt-neox#1259",
        TP,
        before_step(TP_LAB, "[dist.all_reduce(p.grad) for p in tp_model.parameters() if not hasattr(p, 'to_local')]"),
        ("some-tensors-scaled", "some-tensors-summed"),
    ),
    MeshMistake(
        "tensor parallelism by DTensor",
        "a partial sum is labelled replicated: the output of a row-parallel layer is not reduced in the backward pass",
        "torchtitan#3412, Automodel#1260",
        TP,
        in_file(
            "src/tensor_parallel.py",
            (
                r"        q, k, v = self\.wq\(x\), self\.wk\(x\), self\.wv\(x\)\n",
                "        from torch.distributed.tensor import DTensor, Replicate\n"
                "        x = DTensor.from_local(x, self.wq.weight.device_mesh, [Replicate()]).to_local()\n"
                "        q = F.linear(x, self.wq.weight.to_local(), self.wq.bias.to_local())\n"
                "        k, v = self.wk(x), self.wv(x)\n",
            ),
        ),
        ("backward-wrong", "parts-of-a-sum", "exchanged-otherwise"),
    ),
)

FFN_NORM_PLAIN = (r' +"ffn_norm": SequenceParallel\(\),\n', "")
NORM_GRADIENT = (
    "for layer in sharded_model.layers: g = layer.ffn_norm.weight.grad.to_local(); "
    "dist.all_reduce(g, group=tp_mesh.get_group())"
)

SEQUENCE_MISTAKES = (
    MeshMistake(
        "sequence parallelism",
        "the gradient of a norm's weight is not reduced over the tensor-parallel group",
        "Megatron-LM#1446, TransformerEngine#435",
        FSDP_TP,
        in_file(TORCH_TP, FFN_NORM_PLAIN),
        ("some-parameters-not-synchronised", "averaged-over-some-ranks"),
    ),
    MeshMistake(
        "sequence parallelism",
        "the gradient of a norm's weight is averaged over the tensor-parallel group, not summed",
        "gpt-neox#1259",
        FSDP_TP,
        (*in_file(TORCH_TP, FFN_NORM_PLAIN), *before_step(TORCH_TP, f"{NORM_GRADIENT}; g /= tp_size")),
        ("some-tensors-scaled", "some-tensors-averaged-twice"),
    ),
    MeshMistake(
        "sequence parallelism",
        "zero_grad is never called",
        "pytorch/examples#1424",
        SEQUENCE,
        in_file("sequence_parallel_example.py", (r" +optimizer\.zero_grad\(\)\n", "")),
        ("previous-step-not-zeroed",),
    ),
    MeshMistake(
        "sequence parallelism",
        "the backward of the all-to-all scatters the dimension that it must gather",
        "VeOmni#419, DeepSpeed#5808",
        ULYSSES,
        in_file(
            "ulysses.py",
            (
                r"exchange\(grad, ctx\.gather, ctx\.scatter\)",
                "exchange(grad, ctx.gather, ctx.scatter).flip(ctx.scatter)",
            ),
        ),
        ("backward-wrong",),
    ),
    MeshMistake(
        "sequence parallelism",
        "norms are left out of the reduction",
        "Megatron-LM#443",
        ULYSSES,
        in_file(
            "ulysses.py",
            (
                r"for parameter in model\.parameters\(\):\n",
                'for name, parameter in model.named_parameters():\n        if "norm" in name:\n            continue\n',
            ),
        ),
        ("some-parameters-not-synchronised",),
    ),
)

REDUCED_BACK = r"(class ReduceFromModelParallelRegion[\s\S]*?def backward\(ctx, grad_output\):\n)"
COPIED_BACK = r"(class CopyToModelParallelRegion[\s\S]*?def backward\(ctx, grad_output\):\n)"
GATHER_BACK = r"(class GatherFromModelParallelRegion[\s\S]*?def backward\(ctx, grad_output\):\n)"

MEGATRON_MISTAKES = (
    MeshMistake(
        "tensor parallelism by hand",
        "the gradient of a column-parallel layer's input is not reduced",
        "Megatron-LM#7452, SkyRL#1886",
        PICOTRON_TP,
        in_file(TP_COMM, (COPIED_BACK, r"\1        return grad_output\n")),
        ("backward-wrong", "parts-of-a-sum", "exchanged-otherwise"),
    ),
    MeshMistake(
        "tensor parallelism by hand",
        "the all-reduce of a row-parallel layer's output is reduced again in the backward pass",
        "pytorch#58005",
        PICOTRON_TP,
        in_file(
            TP_COMM,
            (REDUCED_BACK, r"\1        dist.all_reduce(grad_output, group=pgm.process_group_manager.tp_group)\n"),
        ),
        ("some-tensors-scaled", "summed-over-ranks"),
    ),
    MeshMistake(
        "tensor parallelism by hand",
        "the gather's backward sums gradients that are the same on all ranks",
        "pytorch#58005, open_clip#616",
        PICOTRON_TP,
        in_file(
            TP_COMM,
            (GATHER_BACK, r"\1        dist.all_reduce(grad_output, group=pgm.process_group_manager.tp_group)\n"),
        ),
        ("some-tensors-scaled", "summed-over-ranks", "multiplied-by-ranks-of-the-same-samples"),
    ),
    MeshMistake(
        "tensor parallelism by hand",
        "each rank clips by the norm of what it holds",
        "NeMo-RL#3788, AReaL#312",
        PICOTRON_TP,
        before_step("train.py", "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
        ("clipped-shard-by-shard",),
    ),
    MeshMistake(
        "tensor parallelism by hand",
        "a replicated bias is added on each rank before the reduction",
        "transformers#48792",
        PICOTRON_TP,
        (
            *in_file(
                TP_LAYERS,
                (
                    r"output_parallel = F\.linear\(x, self\.weight\)\n",
                    "output_parallel = F.linear(x, self.weight, self.bias)\n",
                ),
                (r"return output if self\.bias is None else output \+ self\.bias", "return output"),
            ),
            (
                "train.py",
                r"( +)(model\.to\(dtype\)\.to\(device\)\n)",
                r"\1for layer in model.modules():\n"
                r"\1    if type(layer).__name__ == 'RowParallelLinear':\n"
                r"\1        layer.bias = torch.nn.Parameter(torch.zeros(layer.out_features))\n\1\2",
            ),
        ),
        ("some-tensors-scaled", "some-parameters-not-synchronised"),
    ),
)

CP_MISTAKES = (
    MeshMistake(
        "context parallelism",
        "gradients are not reduced over the ranks of the sequence",
        "picotron's train.py as published; verl#7493",
        PICOTRON_CP,
        in_file(
            "train.py",
            (
                r"cp_dp_world_size > 1:\n( +)model = DataParallelBucket",
                r"dp_world_size > 1:\n\1model = DataParallelBucket",
            ),
        ),
        ("not-synchronised",),
    ),
    MeshMistake(
        "context parallelism",
        "the ring's backward pass uses the first keys and values at every turn",
        "diffusers#14265",
        PICOTRON_CP,
        in_file(CP_FILE, (r"(kv_comm\.wait\(\)\n) +k = next_k\n +v = next_v\n(\n +next_dk)", r"\1\2")),
        ("backward-wrong",),
    ),
    MeshMistake(
        "context parallelism",
        "gradients of keys and values do not return to the ranks that sent them",
        "Megatron-LM#1464, TransformerEngine#1557",
        PICOTRON_CP,
        in_file(CP_FILE, (r"return dq, next_dk, next_dv, None, None", "return dq, dk, dv, None, None")),
        ("backward-wrong",),
    ),
    MeshMistake(
        "context parallelism",
        "the ring's backward pass leaves out the causal mask",
        "Megatron-LM#1464",
        PICOTRON_CP,
        in_file(CP_FILE, (r"bwd_causal = is_causal and step == 0", "bwd_causal = False")),
        ("backward-wrong",),
    ),
    MeshMistake(
        "context parallelism",
        "gradients are averaged over the ranks of data parallelism only",
        "Megatron-LM#673, VeOmni#338 (the group of the reduction)",
        DP_CP,
        in_file(DP_FILE, (r"pgm\.process_group_manager\.cp_dp_group", "pgm.process_group_manager.dp_group")),
        ("averaged-over-some-ranks", "not-synchronised"),
    ),
)

EXPERT_MISTAKES = (
    MeshMistake(
        "experts",
        "gradients of experts are sums over ranks, and all others are means",
        "torchtitan#1551, megablocks#20, Megatron-LM#5956",
        EXPERTS,
        in_file(
            "experts.py", (r'( +)if "experts" not in name:\n', r'\1if "experts" in name:\n\1    continue\n\1else:\n')
        ),
        ("some-tensors-summed", "some-tensors-scaled", "experts-scaled"),
    ),
    MeshMistake(
        "experts",
        "gradients of the router are not reduced",
        "torchtitan#4054",
        EXPERTS,
        in_file("experts.py", (r'if "experts" not in name', 'if "moe" not in name')),
        ("some-parameters-not-synchronised",),
    ),
    MeshMistake(
        "experts",
        "experts of different ranks are averaged like replicas",
        "fairseq#4220",
        EXPERTS,
        in_file("experts.py", (r'if "experts" not in name', "if True")),
        ("blocks-averaged-with-each-other",),
    ),
    MeshMistake(
        "experts",
        "tokens are exchanged without a gradient",
        "Automodel#1260",
        EXPERTS,
        in_file(
            "experts.py",
            (r"( +)returned = torch\.empty_like\(grad\)\n.*\n +return returned", r"\1return grad"),
        ),
        ("backward-wrong",),
    ),
    MeshMistake(
        "experts",
        "each rank clips by a norm that has only its own experts",
        "AReaL#312, fastmoe#169",
        EXPERTS,
        in_file("experts.py", (r"    dist\.all_reduce\(square\)\n", "")),
        ("clipped-shard-by-shard",),
    ),
    MeshMistake(
        "experts",
        "all parameters but the experts have no gradient",
        "transformers#48205",
        EXPERTS,
        in_file(
            "experts.py",
            (
                r"( +)average_gradients\(model, world\)\n",
                r"\1average_gradients(model, world)\n"
                r"\1for name, p in model.named_parameters():\n\1    p.grad *= 'experts' in name\n",
            ),
        ),
        ("some-zero", "nothing-but-experts-trained"),
    ),
)

TWO_WINDOWS = (
    (r"( +)if is_first and is_last:\n", r"\1for half in (0, 1):\n\1  losses = []\n\1  if is_first and is_last:\n"),
    (r"( +)elif is_first:\n( +)schedule", r"\1  elif is_first:\n\2schedule"),
    (r"( +)elif is_last:\n( +)schedule", r"\1  elif is_last:\n\2schedule"),
    (r"( +)else:\n( +)schedule", r"\1  else:\n\2schedule"),
)

PP_MISTAKES = (
    MeshMistake(
        "pipelines",
        "gradients are scaled after every window of micro-batches, earlier ones again",
        "torchtitan#1733",
        GPIPE,
        in_file(PP_LAB, *TWO_WINDOWS),
        ("reduced-with-every-micro-batch", "scaled-with-every-window"),
    ),
    MeshMistake(
        "pipelines",
        "each stage divides the gradient that it sends by the micro-batches again",
        "DeepSpeed#8152",
        PICOTRON_PP,
        in_file(
            PP_FILE,
            (
                r"return input_tensor\.grad if input_tensor is not None else None",
                "return input_tensor.grad / 2 if input_tensor is not None else None",
            ),
        ),
        ("exchanged-otherwise", "some-tensors-scaled", "divided-twice"),
    ),
    MeshMistake(
        "pipelines",
        "stages clip by their own norms",
        "torchtitan#596, modalities#313",
        GPIPE,
        before_step(PP_LAB, "nn.utils.clip_grad_norm_(stage_module.parameters(), 0.1)"),
        ("clipped-shard-by-shard",),
    ),
    MeshMistake(
        "pipelines",
        "zero_grad is never called",
        "pytorch/examples#1424",
        ONE_F_ONE_B,
        in_file(PP_LAB, (r" +optimizer\.zero_grad\(set_to_none=True\)\n", "")),
        ("previous-step-not-zeroed",),
    ),
    MeshMistake(
        "pipelines",
        "gradients of one stage are lost between the windows",
        "Automodel#3530",
        ZERO_BUBBLE,
        in_file(
            PP_LAB,
            *TWO_WINDOWS,
            (r"(\n +)losses = \[\]\n( +  if is_first and)", r"\1losses = []\1optimizer.zero_grad()\n\2"),
            (r"n_microbatches=args\.microbatches, ", "n_microbatches=args.microbatches, scale_grads=False, "),
        ),
        ("first-micro-batches-missing", "only-last-micro-batch"),
    ),
    MeshMistake(
        "pipelines",
        "a tied weight lives on two stages, and its gradients are not summed",
        "torchtitan#4486",
        INTERLEAVED,
        in_file(
            PP_LAB,
            (r"( +)(full_params = full_model)", r"\1full_model.head.weight = full_model.tok_emb.weight\n\1\2"),
        ),
        ("tied-gradients-not-added",),
    ),
    MeshMistake(
        "pipelines",
        "backward passes take the latest micro-batch instead of the oldest",
        "DeepSpeed#5729 (micro-batches of different stages mixed up)",
        PICOTRON_PP,
        in_file(
            PP_FILE,
            (
                r"(# Process remaining stored[\s\S]*?)input_tensors\.pop\(0\), output_tensors\.pop\(0\)",
                r"\1input_tensors.pop(), output_tensors.pop()",
            ),
            (
                r"(# Retrieve oldest[\s\S]*?)input_tensors\.pop\(0\), output_tensors\.pop\(0\)",
                r"\1input_tensors.pop(), output_tensors.pop()",
            ),
        ),
        ("activations-of-another-micro-batch", "exchanged-otherwise"),
    ),
    MeshMistake(
        "pipelines",
        "data-parallel replicas of a pipeline are not averaged",
        "picotron#5",
        DP_PP,
        in_file(
            "train.py",
            (
                r"dp_world_size > 1:\n( +)model = DataParallelBucket",
                r"cp_world_size > 1:\n\1model = DataParallelBucket",
            ),
        ),
        ("not-synchronised", "some-parameters-not-synchronised"),
    ),
)

GATHERED_MISTAKES = (
    MeshMistake(
        "gathered losses",
        "the gather's backward leaves out the other ranks",
        "lightly#1528, SLIP#31",
        VICREG,
        in_file("main_vicreg.py", (r"        dist\.all_reduce\(all_gradients\)\n", "")),
        ("exchanged-otherwise",),
    ),
    MeshMistake(
        "gathered losses",
        "the gather's backward takes another rank's gradient",
        "DeepSpeed#7672 (the rank that indexes it)",
        VICREG,
        in_file("main_vicreg.py", (r"all_gradients\[dist\.get_rank\(\)\]", "all_gradients[dist.get_rank() - 1]")),
        ("exchanged-otherwise", "backward-wrong"),
    ),
    MeshMistake(
        "gathered losses",
        "the gather's backward counts the gradient once per rank more",
        "open_clip#616, pytorch#58005",
        VICREG,
        in_file(
            "main_vicreg.py",
            (r"(        dist\.all_reduce\(all_gradients\)\n)", r"\1        all_gradients *= dist.get_world_size()\n"),
        ),
        ("exchanged-otherwise", "some-tensors-scaled", "summed-over-ranks"),
    ),
    MeshMistake(
        "gathered losses",
        "the module inside DDP is called: only the loss communicates",
        "sd-scripts#924, Lightning Fabric#17424",
        CONTRASTIVE,
        in_file("contrastive.py", (r"model\(views\)", "model.module(views)")),
        ("not-synchronised",),
    ),
)

MESH_MISTAKES = (
    *(FSDP1_MISTAKES + FSDP2_MISTAKES + ZERO_MISTAKES + TP_MISTAKES + SEQUENCE_MISTAKES),
    *(MEGATRON_MISTAKES + CP_MISTAKES + EXPERT_MISTAKES + PP_MISTAKES + GATHERED_MISTAKES),
)
"""Every mistake."""
