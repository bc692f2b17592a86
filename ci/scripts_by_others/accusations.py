"""Programs that prove each accusation of a published script by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "proofs"
REPRODUCTIONS = ROOT / "suites" / "expectations" / "reproductions"


@dataclass(frozen=True)
class Proof:
    """A program without Plumbline, for ``ranks`` ranks; ``because`` says in a sentence what it shows."""

    file: Path
    because: str
    ranks: int = 1

    def run(self) -> str | None:
        """Return the program's output, or None if it fails."""
        command = [sys.executable, str(self.file)]
        if self.ranks > 1:
            torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}", "--standalone"]
            command = [*torchrun, "--no-python", *command]
        # Without buffering, ranks would write lines in pieces and interleave them.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        return "\n".join(sorted(done.stdout.strip().splitlines())) if done.returncode == 0 else None


PROOFS = {
    ("pytorch-tutorial", "set-epoch-never-called"): Proof(
        PROGRAMS / "sampler_without_set_epoch.py", "each epoch has the order of the first"
    ),
    ("nanogpt", "another-rate"): Proof(
        PROGRAMS / "one_rate_for_all_groups.py", "all groups of the optimizer get the rate of its schedule"
    ),
    ("fabric-example", "windows-of-another-length"): Proof(
        PROGRAMS / "counter_of_steps.py", "it steps at the first batch and never again"
    ),
    ("accelerate-example", "short-window-divided-by-full-length"): Proof(
        REPRODUCTIONS / "accelerate_short_window.py", "backward divides by gradient_accumulation_steps in any case"
    ),
    ("accelerate-example", "schedule-stepped-once-a-rank"): Proof(
        REPRODUCTIONS / "accelerate_two_ranks.py", "by design, a prepared schedule counts batches of one device", 2
    ),
    ("accelerate-example", "last-batch-filled-up"): Proof(
        REPRODUCTIONS / "accelerate_two_ranks.py", "the last batch repeats samples of the first ones", 2
    ),
    ("accelerate-example", "one-seed-on-all-ranks"): Proof(
        PROGRAMS / "one_seed.py", "set_seed gives all ranks one generator, and dropout one mask", 2
    ),
}
"""By subject and cause."""
