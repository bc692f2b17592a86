"""Trainings that ``check`` can judge only in part, or not at all, and wrong ones that it might call right.

All scripts are ours. A wrong one is a separate file, or a right one with a change.
"""

from __future__ import annotations

from rewritten import alone, two
from script import Script

RIGHT, IN_PART, NOT_JUDGED, WRONG = "right", "right in part", "not judged", "wrong"

UNTRUE_OF_A_PART = (IN_PART, NOT_JUDGED, WRONG)
"""Accepted verdicts for a mistake in a part that need not be judged: all but RIGHT."""


def with_mistake(script: Script, name: str, says: str, accepted: tuple[str, ...], *changes: tuple[str, str]) -> Script:
    """Return a right script with a mistake in it."""
    file = script.command.split()[-1]
    return Script(
        f"{script.name}, {name}",
        script.command,
        f"{script.covers}; {says}",
        changes=tuple((file, pattern, text) for pattern, text in changes),
        ranks=script.ranks,
        accepted=accepted,
        because=says,
        is_wrong=True,
    )


TENSOR_PARALLEL = two(
    "tensor_parallel",
    "DTensor tensor parallelism by parallelize_module",
)
PIPELINE = two(
    "pipeline_stages",
    "two stages of torch.distributed.pipelining",
)
MUON = two("muon", "an optimizer that exchanges updates in its step")
LONG_EPOCHS = two("long_epochs", "DistributedSampler, epochs longer than the recorded steps")
HOOKS = two("hooks_average", "hooks that average gradients during the backward pass")
LORA = two("lora", "LoRA by hand, gradients averaged after the backward pass")
LORA_ON_SHARDS = two("lora_on_shards", "LoRA on FSDP2: adapters on each rank, the frozen base in shards")

HALF_JUDGED_SCRIPTS = (
    TENSOR_PARALLEL,
    with_mistake(
        TENSOR_PARALLEL,
        "gradient × 3",
        "the gradient of a split weight is multiplied by three",
        UNTRUE_OF_A_PART,
        (r"( +)optimizer\.step\(\)", r"\1model[0].up.weight.grad.mul_(3.0)\n\1optimizer.step()"),
    ),
    with_mistake(
        TENSOR_PARALLEL,
        "bias × world",
        "the gradient of the bias after the rows is counted once per rank",
        UNTRUE_OF_A_PART,
        (r"( +)optimizer\.step\(\)", r"\1model[0].down.bias.grad.mul_(2.0)\n\1optimizer.step()"),
    ),
    two(
        "optimizer_before_shards",
        "FSDP2, with an optimizer that is created before fully_shard",
        accepted=(WRONG,),
        because="the optimizer holds the old parameters, so no weight moves",
        is_wrong=True,
    ),
    Script(
        "deepspeed float16 without ZeRO",
        "deepspeed --num_accelerators 2 --master_port 29616 deepspeed_zero.py",
        "DeepSpeed in float16 without ZeRO",
        needs=("deepspeed",),
        environment={"FLOAT16": "1", "STAGE": "0"},
        ranks=2,
        accepted=(WRONG,),
        because="DeepSpeed divides gradients by a loss scale by which it does not multiply the loss (#8393)",
        is_wrong=True,
    ),
    alone(
        "optimizer_of_a_copy",
        "the optimizer's parameters are those of another copy of the model",
        accepted=(WRONG,),
        because="no weight of the trained model is in an optimizer",
        is_wrong=True,
    ),
    HOOKS,
    with_mistake(
        HOOKS,
        "own initial weights",
        "each rank draws its own weights, so each has a different model",
        (WRONG,),
        (r"torch\.manual_seed\(0\)", "torch.manual_seed(rank)"),
    ),
    two(
        "one_class",
        "cross-entropy over one class",
        accepted=(NOT_JUDGED,),
        because="all gradients are zero, so no mistake could show",
    ),
    MUON,
    with_mistake(
        MUON,
        "updates summed",
        "every rank orthogonalises every matrix, and the updates are summed over the ranks",
        UNTRUE_OF_A_PART,
        (r"if i % world == rank:", "if True:"),
    ),
    with_mistake(
        MUON,
        "half not orthogonalised",
        "for every other matrix, the update is the momentum itself",
        UNTRUE_OF_A_PART,
        (r"updates\[i\] = orthogonal\((.*)\)\n", r"updates[i] = \1 if i % 2 else orthogonal(\1)\n"),
    ),
    two(
        "checkpoint_other_masks",
        "activation checkpointing, dropout, preserve_rng_state=False",
        accepted=(WRONG,),
        because="the backward pass computes with other masks than the forward pass",
        is_wrong=True,
    ),
    LORA,
    with_mistake(
        LORA,
        "weights differ",
        "rank 1 starts with adapters that are 2 % larger",
        (WRONG,),
        (r"( +)(optimizer = )", r"\1for p in trained:\n\1    p.data *= 1 + 0.02 * rank\n\1\2"),
    ),
    LORA_ON_SHARDS,
    with_mistake(
        LORA_ON_SHARDS,
        "weights differ",
        "rank 1 starts with adapters that are 2 % larger",
        (WRONG,),
        (r"( +)(optimizer = )", r"\1for p in trained:\n\1    p.data *= 1 + 0.02 * rank\n\1\2"),
    ),
    two(
        "missing_on_a_rank",
        "DDP, four parameters are missing from the optimizer of rank 1",
        accepted=(WRONG,),
        because="these parameters move only on rank 0",
        is_wrong=True,
    ),
    LONG_EPOCHS,
    with_mistake(
        LONG_EPOCHS,
        "set_epoch never called",
        "every epoch repeats the order of the first",
        (WRONG,),
        (r" +sampler\.set_epoch\(epoch\)\n", ""),
    ),
    with_mistake(
        LONG_EPOCHS,
        "decayed by hand as well",
        "weights decay by hand beside AdamW, which decays them too",
        UNTRUE_OF_A_PART,
        (
            r"( +)optimizer\.step\(\)",
            r"\1optimizer.step()\n\1with torch.no_grad():\n\1    for p in model.parameters():\n\1        p.mul_(0.999)",
        ),
    ),
    with_mistake(
        LONG_EPOCHS,
        "optimizer made for each step",
        "a new AdamW takes each step, so that its averages are always those of one gradient",
        (WRONG,),
        (
            r"( +)optimizer\.step\(\)",
            r"\1optimizer.step()\n\1optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)",
        ),
    ),
    PIPELINE,
    with_mistake(
        PIPELINE,
        "gradient × 3",
        "the gradients of the first stage are multiplied by three",
        UNTRUE_OF_A_PART,
        (
            r"( +)optimizer\.step\(\)",
            r"\1if rank == 0:\n\1    module[0].weight.grad.mul_(3.0)\n\1optimizer.step()",
        ),
    ),
    two(
        "averages_in_step",
        "an optimizer that averages gradients over the ranks in its step",
        accepted=(RIGHT, IN_PART, NOT_JUDGED),
        because="gradients are averaged after the optimizer receives them",
    ),
    two(
        "shards_own_norm",
        "FSDP2, clipped by hand with the norm of a rank's own shards",
        accepted=(WRONG, NOT_JUDGED),
        because="ranks clip with different factors",
        is_wrong=True,
    ),
    alone(
        "rate_zero",
        "a schedule that returns a learning rate of 0",
        accepted=(NOT_JUDGED,),
        because="no weight moves, so no wrong update could show",
    ),
    alone(
        "zero_gradients",
        "a loss whose mask selects nothing",
        accepted=(NOT_JUDGED,),
        because="all gradients are zero, so no mistake could show",
    ),
    two(
        "gradients_by_grad",
        "torch.autograd.grad instead of backward",
        accepted=(RIGHT, IN_PART, NOT_JUDGED),
        because="no backward pass is seen",
        calls_backward=False,
    ),
)
