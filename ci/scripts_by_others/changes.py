"""Changes of the scripts: repairs of the mistakes that they have as published, and new mistakes.

A change replaces lines of a script's text. A mistake is put into the repaired script, so that it is the only one.
"""

from __future__ import annotations

from dataclasses import dataclass

Replacements = tuple[tuple[str, str], ...]

SCRIPTS = {
    "pytorch-tutorial": "multigpu_torchrun",
    "nanogpt": "train_gpt",
    "accelerate-example": "gradient_accumulation",
    "fabric-example": "own_trainer",
}
"""The script of each subject; its adapter is named after the subject."""

REPAIRS: dict[str, Replacements] = {
    # It never calls set_epoch.
    "pytorch-tutorial": (
        (
            "            self._run_epoch(epoch)\n",
            "            self.train_data.sampler.set_epoch(epoch)\n            self._run_epoch(epoch)\n",
        ),
    ),
    # It steps if the number of steps is a multiple of the window: once, and never again. Losses are not divided.
    "fabric-example": (
        (
            "should_optim_step = self.global_step % self.grad_accum_steps == 0\n",
            "place = batch_idx % self.grad_accum_steps\n"
            "            self.window = min(self.grad_accum_steps, len(train_loader) - (batch_idx - place))\n"
            "            should_optim_step = place == self.window - 1\n",
        ),
        ("self.fabric.backward(loss)", "self.fabric.backward(loss / self.window)"),
    ),
}
"""The changes that repair the wrong published scripts."""


PLAIN = ("mlp/ddp/1x2/32", "cnn-batchnorm/ddp/1x3/32", "lm-tokens/ddp/1x4/64", "adamw/ddp/1x2/32")
ONE_RATE = PLAIN[:3]  # nanoGPT sets one rate in all parameter groups, but the workload adamw has two
# With as many micro-batches as ranks, a sum over micro-batches and a sum over ranks would have the same factor.
WINDOWS = ("accumulation/ddp/1x2/32", "accumulation/ddp/1x4/32", "accumulation-tokens/ddp/1x3/32")
CLIPPED = ("clipping/ddp/1x2/16", "clipping-adamw/ddp/1x3/16")


@dataclass(frozen=True)
class Mistake:
    """``replacements`` in the script of ``subject``, and the expected first finding on each of ``cells``.

    ``causes`` are those that name the mistake; none if the changed script is right. ``repaired``: the script is
    repaired first.
    """

    name: str
    subject: str
    cells: tuple[str, ...]
    causes: tuple[str, ...]
    replacements: Replacements
    repaired: bool = True

    @property
    def id(self) -> str:
        """A unique name."""
        return f"{self.subject}-{self.name}"


DRAWN = (
    "{0}torch.manual_seed({1})\n{0}for parameter in {2}.parameters():\n"
    "{0}    torch.nn.init.normal_(parameter, std=0.1)\n"
)
"""Initialises each rank's own weights, as a script does that seeds ranks differently before it builds its model."""

TUTORIAL_DDP = 'self.model = DDP(self.model, device_ids=[self.rank] if self.device.type == "cuda" else None)\n'
GPT_DDP = 'model = DDP(model, device_ids=[torch.device(device).index] if device_type == "cuda" else None)\n'

MISTAKES = (
    Mistake("no-set-epoch", "pytorch-tutorial", PLAIN, ("set-epoch-never-called",), (), repaired=False),
    Mistake(
        "inner-module", "pytorch-tutorial", PLAIN, ("not-synchronised",),
        (("self.model(source)", "self.model.module(source)"),),
    ),
    Mistake(
        "inner-module", "nanogpt", ONE_RATE, ("not-synchronised",),
        ((" = model(X, Y)", " = model.module(X, Y)"),),
    ),
    Mistake(
        "inner-module", "accelerate-example", PLAIN, ("not-synchronised",),
        (("output = model(**batch)", "output = model.module(**batch)"),),
    ),
    Mistake(
        "inner-module", "fabric-example", PLAIN, ("not-synchronised",),
        (("outputs = model.training_step(", "outputs = model.module.training_step("),),
    ),
    Mistake(
        "no-distributed-sampler", "pytorch-tutorial", PLAIN, ("no-sampler",),
        (("        shuffle=False,\n        sampler=DistributedSampler(dataset),\n", "        shuffle=True,\n"),),
        repaired=False,
    ),
    Mistake(
        "one-seed-for-all-ranks", "nanogpt", ONE_RATE, ("ranks-alike",),
        (("manual_seed(1337 + seed_offset)", "manual_seed(1337)"),),
    ),
    Mistake(
        "no-distributed-sampler", "accelerate-example", PLAIN, ("no-sampler",),
        (
            ("    model, optimizer, train_dataloader, eval_", "    model, optimizer, eval_"),
        ),
    ),
    Mistake(
        "no-distributed-sampler", "fabric-example", PLAIN, ("no-sampler",),
        (("(train_loader, use_distributed_sampler=self.use_distributed_sampler)",
          "(train_loader, use_distributed_sampler=False)"),),
    ),
    Mistake(
        "no-zero-grad", "pytorch-tutorial", PLAIN, ("previous-step-not-zeroed",),
        (("self.optimizer.zero_grad()", "pass"),),
    ),
    Mistake(
        "no-zero-grad", "nanogpt", ONE_RATE, ("previous-step-not-zeroed",),
        (("        optimizer.zero_grad(set_to_none=True)\n", ""),),
    ),
    Mistake(
        "no-zero-grad", "accelerate-example", PLAIN, ("previous-step-not-zeroed",),
        (("                optimizer.zero_grad()\n", ""),),
    ),
    Mistake(
        "no-zero-grad", "fabric-example", PLAIN, ("previous-step-not-zeroed",),
        (("                optimizer.zero_grad()\n", ""),),
    ),
    Mistake(
        "loss-not-divided", "nanogpt", WINDOWS, ("not-divided-by-micro-batches",),
        (("                loss = loss / micro_steps\n", ""),),
    ),
    Mistake(
        "loss-not-divided", "fabric-example", WINDOWS, ("not-divided-by-micro-batches",),
        (("(loss / self.window)", "(loss)"),),
    ),
    Mistake(
        "clipped-before-unscaled", "nanogpt", CLIPPED, ("clipped-before-unscaling",),
        (("            scaler.unscale_(optimizer)\n", ""),),
    ),
    Mistake(
        "not-set-up", "pytorch-tutorial", PLAIN, ("not-synchronised",),
        ((TUTORIAL_DDP, "pass\n"), ("self.model.module.state_dict()", "self.model.state_dict()")),
    ),
    Mistake("not-set-up", "nanogpt", ONE_RATE, ("not-synchronised",), ((GPT_DDP, "pass\n"),)),
    Mistake(
        "not-set-up", "accelerate-example", PLAIN, ("not-synchronised",),
        (
            ("    model, optimizer, train_dataloader, eval_", "    optimizer, train_dataloader, eval_"),
        ),
    ),
    Mistake(
        "not-set-up", "fabric-example", PLAIN, ("not-synchronised",),
        (("model, optimizer = self.fabric.setup(model, optimizer)",
          "optimizer = self.fabric.setup_optimizers(optimizer)"),),
    ),
    Mistake(
        "own-weights", "pytorch-tutorial", PLAIN, ("not-broadcast",),
        (
            (f"        {TUTORIAL_DDP}", DRAWN.format(" " * 8, "self.rank", "self.model") + f"        {TUTORIAL_DDP}"),
            (TUTORIAL_DDP, TUTORIAL_DDP.replace("DDP(self.model,", "DDP(self.model, init_sync=False,")),
        ),
    ),
    Mistake(
        "own-weights", "nanogpt", ONE_RATE, ("not-broadcast",),
        (
            ("    model.to(device)\n", DRAWN.format(" " * 4, "1337 + seed_offset", "model") + "    model.to(device)\n"),
            (GPT_DDP, GPT_DDP.replace("DDP(model,", "DDP(model, init_sync=False,")),
        ),
    ),
    Mistake(
        "no-accumulate", "accelerate-example", WINDOWS, ("stepped-every-micro-batch",),
        (("with accelerator.accumulate(model):", "if True:"),),
    ),
    Mistake(
        "always-synchronised", "nanogpt", WINDOWS, (),
        (("model.require_backward_grad_sync = micro_step == micro_steps - 1", "pass"),),
    ),
    Mistake(
        "synchronised-first", "nanogpt", WINDOWS, ("some-micro-batches-not-synchronised",),
        (("micro_step == micro_steps - 1", "micro_step == 0"),),
    ),
    Mistake(
        "synchronised-first", "fabric-example", WINDOWS, ("some-micro-batches-not-synchronised",),
        (
            ("    def training_step(self, model, batch, batch_idx):\n",
             "    def training_step(self, model, batch, batch_idx):\n"
             "        with self.fabric.no_backward_sync(model, enabled=batch_idx % self.grad_accum_steps != 0):\n"
             "            return self.inner_step(model, batch, batch_idx)\n\n"
             "    def inner_step(self, model, batch, batch_idx):\n"),
        ),
    ),
)  # fmt: skip


def changed(text: str, replacements: Replacements) -> str:
    """Return ``text`` with all ``replacements`` applied at every match.

    Raises:
        ValueError: a text to be replaced is missing: the script has changed.
    """
    for old, new in replacements:
        if old not in text:
            raise ValueError(f"the script has no {old!r}")
        text = text.replace(old, new)
    return text


def source(text: str, mistake: Mistake) -> str:
    """Return a script's ``text`` with the mistake in it."""
    repairs = REPAIRS.get(mistake.subject, ()) if mistake.repaired else ()
    return changed(changed(text, repairs), mistake.replacements)
