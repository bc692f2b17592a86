"""Mistakes that are put into copies of scripts, and the causes that name them."""

from __future__ import annotations

from mistake import (
    ACCELERATE,
    AMP,
    BY_HAND,
    DDP,
    GRADIENTS,
    IGNORE,
    IMAGENET,
    NANOGPT,
    Mistake,
    after_step,
    before_step,
)

MISTAKES = (
    Mistake(
        "inner module called",
        "the module inside DDP is called, so nothing is reduced",
        ("not-synchronised",),
        {
            AMP: ((r"model\(x\)", "model.module(x)"),),
            NANOGPT: ((r"= model\(X, Y\)\n            loss = ", "= model.module(X, Y)\n            loss = "),),
            ACCELERATE: ((r"output = model\(", "output = model.module("),),
            DDP: ((r"model\(x\)", "model.module(x)"),),
        },
    ),
    Mistake(
        "always no_sync",
        "no micro-batch is reduced",
        ("not-synchronised",),
        {
            AMP: ((r"nullcontext\(\) if last else model\.no_sync\(\)", "model.no_sync()"),),
            NANOGPT: ((r"model\.require_backward_grad_sync = .*", "model.require_backward_grad_sync = False"),),
            ACCELERATE: ((r"accelerator\.accumulate\(model\)", "model.no_sync(), accelerator.accumulate()"),),
        },
    ),
    Mistake(
        "first micro-batch reduced",
        "the first micro-batch is reduced instead of the last",
        ("some-micro-batches-not-synchronised", "not-synchronised"),
        {
            AMP: ((r"nullcontext\(\) if last", "nullcontext() if i % ACCUMULATE == 0"),),
            NANOGPT: ((r"\(micro_step == .* - 1\)", "(micro_step == 0)"),),
            ACCELERATE: (
                (
                    r"( +)(output = model\()",
                    r"\1model.require_backward_grad_sync = not accelerator.sync_gradients\n\1\2",
                ),
            ),
        },
    ),
    Mistake(
        "summed over ranks",
        "DDP's mean is multiplied by the world size",
        ("summed-over-ranks",),
        before_step(f"torch._foreach_mul_({GRADIENTS}, 2.0)", AMP, NANOGPT, ACCELERATE, DDP),
    ),
    Mistake(
        "averaged twice",
        "DDP's mean is divided by the world size again",
        ("averaged-twice", "divided-twice"),  # the two divisors are equal if there are as many ranks as micro-batches
        before_step(f"torch._foreach_div_({GRADIENTS}, 2.0)", AMP, NANOGPT, ACCELERATE, DDP),
    ),
    Mistake(
        "zeroed in every micro-batch",
        "zero_grad before each backward pass: only the last micro-batch counts",
        ("only-last-micro-batch",),
        {
            AMP: ((r"( +)scaler\.scale", r"\1optimizer.zero_grad()\n\1scaler.scale"),),
            NANOGPT: ((r"( +)scaler\.scale", r"\1optimizer.zero_grad()\n\1scaler.scale"),),
            ACCELERATE: ((r"( +)accelerator\.backward", r"\1model.zero_grad()\n\1accelerator.backward"),),
        },
    ),
    Mistake(
        "divided twice",
        "gradients are divided by the micro-batches although the loss is",
        ("divided-twice",),
        {
            AMP: before_step(f"torch._foreach_div_({GRADIENTS}, 3.0)", AMP)[AMP],
            NANOGPT: before_step(f"torch._foreach_div_({GRADIENTS}, 4.0)", NANOGPT)[NANOGPT],
        },
    ),
    Mistake(
        "loss not divided",
        "the loss is not divided by the micro-batches",
        ("not-divided-by-micro-batches",),
        {AMP: ((r" / ACCUMULATE\n", "\n"),)},
    ),
    Mistake(
        "loss not divided, no DataLoader",
        "the same, but it is unknown which batches belong together: it may be intended",
        (),
        {NANOGPT: ((r"loss = loss / .*", "pass"),)},
    ),
    Mistake(
        "clipped before unscaling",
        "clip_grad_norm_ on gradients that still contain the loss scale",
        ("clipped-before-unscaling",),
        {AMP: ((r" +scaler\.unscale_\(optimizer\)\n", ""),)},
    ),
    Mistake(
        "clipped after the step",
        "the optimizer steps before clipping",
        ("not-clipped",),
        {
            AMP: (
                (r"( +)(torch\.nn\.utils\.clip.*\n)( +scaler\.step\(optimizer\)\n)", r"\3\1\2"),
                (r"( +)scaler\.unscale_\(optimizer\)\n", ""),
            ),
            NANOGPT: (
                (r" +if grad_clip.*\n.*\n.*\n", ""),
                (r"( +)(scaler\.update\(\)\n)", r"\1\2\1nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n"),
                (r"import torch\n", "import torch\nfrom torch import nn\n"),
            ),
            DDP: ((r"( +nn\.utils\.clip.*\n)( +optimizer\.step\(\)\n)", r"\2\1"),),
        },
    ),
    Mistake(
        "clipped before averaging",
        "each rank clips its own gradient, then they are averaged",
        ("clipped-before-averaging",),
        {
            DDP: (
                (r"model\(x\)", "model.module(x)"),
                (
                    r"( +)optimizer\.step\(\)\n",
                    r"\1for p in model.parameters():\n\1    dist.all_reduce(p.grad)\n\1    p.grad /= 2\n"
                    r"\1optimizer.step()\n",
                ),
            ),
            NANOGPT: (
                (r"= model\(X, Y\)\n            loss = ", "= model.module(X, Y)\n            loss = "),
                (r"\(model\.parameters\(\), grad_clip\)", "(model.parameters(), 0.05)"),
                (
                    r"( +)(# step the optimizer and scaler.*\n)",
                    r"\1for p in model.parameters():\n\1    torch.distributed.all_reduce(p.grad)\n"
                    r"\1    p.grad /= 2\n\1\2",
                ),
            ),
            BY_HAND: ((r"(  +)(average_gradients)", r"\1nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n\1\2"),),
        },
    ),
    Mistake(
        "previous step not zeroed",
        "zero_grad is missing",
        ("previous-step-not-zeroed",),
        {
            AMP: ((r" +optimizer\.zero_grad\(\)\n", ""),),
            NANOGPT: ((r" +optimizer\.zero_grad\(set_to_none=True\)\n", ""),),
            ACCELERATE: ((r" +optimizer\.zero_grad\(\)\n", ""),),
            DDP: ((r" +optimizer\.zero_grad\(set_to_none=True\)\n", ""),),
        },
    ),
    Mistake(
        "step without unscaling",
        "optimizer.step() instead of scaler.step(optimizer), so nothing unscales",
        ("loss-scale-left-in",),
        {
            AMP: (
                (r" +scaler\.unscale_\(optimizer\)\n", ""),
                (r" +torch\.nn\.utils\.clip.*\n", ""),
                (r"scaler\.step\(optimizer\)\n( +)scaler\.update\(\)", "optimizer.step()"),
            )
        },
    ),
    Mistake(
        "unscaled twice",
        "gradients are divided by the scale by hand and by the scaler",
        ("unscaled-twice",),
        before_step(f"torch._foreach_div_({GRADIENTS}, scaler.get_scale())", AMP),
    ),
    Mistake(
        "schedule per micro-batch",
        "the scheduler steps with every micro-batch",
        ("schedule-stepped-every-micro-batch",),
        {AMP: ((r"    ( +)scheduler\.step\(\)\n", r"\1scheduler.step()\n"),)},
    ),
    Mistake(
        "no sampler",
        "all ranks draw the same rows",
        ("no-sampler", "ranks-alike"),
        {
            AMP: ((r"num_replicas=world_size, rank=rank", "num_replicas=world_size, rank=0"),),
            # Only rank 0 evaluates at the beginning, which draws random numbers.
            NANOGPT: (
                (r"seed_offset = ddp_rank", "seed_offset = 0"),
                (r"if iter_num % eval_interval == 0", "if iter_num and iter_num % eval_interval == 0"),
            ),
            DDP: ((r"DistributedSampler\(data, ", "DistributedSampler(data, num_replicas=2, rank=0, "),),
            IMAGENET: ((r"(DistributedSampler\(train_dataset)", r"\1, num_replicas=2, rank=0"),),
        },
    ),
    Mistake(
        "sampler seeds differ",
        "each rank shuffles with its own seed, so shares overlap",
        ("shards-overlap",),
        {
            AMP: ((r"rank=rank\)\n", "rank=rank, seed=rank)\n"),),
            DDP: ((r"seed=3", "seed=3 + rank"),),
            IMAGENET: ((r"DistributedSampler\(train_dataset", "DistributedSampler(train_dataset, seed=args.rank"),),
        },
    ),
    Mistake(
        "set_epoch never called",
        "the same order in every epoch",
        ("set-epoch-never-called",),
        dict.fromkeys((AMP, DDP, IMAGENET), ((r"\w*sampler\.set_epoch\(epoch\)\n", "pass\n"),)),
        steps=9,  # two epochs, and the beginning of a third
    ),
    Mistake(
        "own initial weights",
        "each rank starts from its own weights",
        ("not-broadcast",),
        {
            AMP: (
                (r"model = DDP\(Net\(\)\)", "torch.manual_seed(rank)\n    model = DDP(Net(), init_sync=False)"),
            ),
            DDP: (
                (r"torch\.manual_seed\(1234\)", "torch.manual_seed(1234 + rank)"),
                (r"nn\.Linear\(64, 4\)\)\)", "nn.Linear(64, 4)), init_sync=False)"),
            ),
            NANOGPT: (
                (r"device_ids=None\)", "init_sync=False)"),
                (r"model = GPT\(gptconf\)\nelif", "torch.manual_seed(ddp_rank); model = GPT(gptconf)\nelif"),
            ),
        },
    ),
    Mistake(
        "parameter not in the optimizer",
        "the last layer is missing from the optimizer: it may be intended, so it is only mentioned",
        (),
        {
            AMP: ((r"AdamW\(model\.parameters\(\)", "AdamW(list(model.parameters())[:-2]"),),
            DDP: ((r"AdamW\(model\.parameters\(\)", "AdamW(list(model.parameters())[:-2]"),),
            ACCELERATE: ((r"AdamW\(params=model\.parameters\(\)", "AdamW(params=list(model.parameters())[:-2]"),),
        },
    ),
    Mistake(
        "one tensor scaled",
        "the gradient of one parameter is multiplied by three: it may be intended",
        (),
        before_step(f"{GRADIENTS}[0].mul_(3.0)", AMP, NANOGPT, ACCELERATE, DDP),
    ),
    Mistake(
        "one tensor not reduced",
        "one parameter keeps each rank's own gradient; the others are reduced",
        ("some-parameters-not-synchronised",),
        {
            AMP: ((r"DDP\(Net\(\)\)", f"Net()\n    {IGNORE}(model, ['head.weight'])\n    model = DDP(model)"),),
            NANOGPT: ((r"( +)model = DDP", rf"\1{IGNORE}(model, ['transformer.wpe.weight'])\n\1model = DDP"),),
            ACCELERATE: (
                (r"( +)(# Prepare everything\n)", rf"\1{IGNORE}(model, ['classifier.weight'])\n\1\2"),
            ),
            DDP: (
                (r"( +)loss\.backward\(\)",
                r"\1(own,) = torch.autograd.grad(loss, model.module[0].weight, retain_graph=True)\n"
                r"\1loss.backward()\n\1model.module[0].weight.grad = own"),
            ),
            BY_HAND: ((r"model\.parameters\(\)(:\n +dist\.all_reduce)", r"list(model.parameters())[:-1]\1"),),
        },
    ),
    Mistake(
        "update applied twice",
        "optimizer.step() is called twice",
        ("changed-between-steps", "stepped-without-a-batch", "one-step-late", "batch-again"),
        after_step("optimizer.step()", DDP, NANOGPT, ACCELERATE),
    ),
    Mistake(
        "weights moved by hand",
        "weights are decayed by hand after the step: it may be intended",
        (),
        after_step("torch._foreach_mul_([p.data for p in model.parameters()], 0.999)", AMP, NANOGPT, ACCELERATE, DDP),
    ),
    Mistake(
        "rate differs on a rank",
        "rank 1 uses another learning rate",
        ("rates-differ",),
        {
            AMP: ((r"lr=2e-3", "lr=2e-3 * (1 + rank)"),),
            DDP: ((r"lr=3e-3", "lr=3e-3 * (1 + rank)"),),
            NANOGPT: ((r"lr = get_lr\(iter_num\) if", "lr = (1 + ddp_rank) * get_lr(iter_num) if"),),
            ACCELERATE: ((r"lr=lr\)", "lr=lr * (1 + accelerator.process_index))"),),
        },
    ),
    Mistake(
        "one mask on all ranks",
        "all ranks drop the same units: a note, not an accusation",
        (),
        {
            AMP: ((r"torch\.manual_seed\(42 \+ rank\)", "torch.manual_seed(42)"),),
            DDP: ((r"torch\.manual_seed\(1234 \+ rank\)", "torch.manual_seed(1234)"),),
        },
    ),
)  # fmt: skip
"""Every mistake."""
