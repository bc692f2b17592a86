"""Measures the cost of evidence: bytes and seconds per step, by number of parameters.

    python ci/bench_evidence.py [--parameters 1e5 1e6 1e7 1e8 1e9] [--tokens 2048] [--rounds 5]

Steps with and without recorders take turns in one process with one thread, as on a rank. Each ratio compares
neighbours, and the median ratio is printed. Seconds are CPU seconds, so other work on the machine counts for less. The
model is a stack of square linear layers with biases, trained by plain SGD: six operations per parameter and token, as
in any dense layer or transformer, and the cheapest optimizer, so nothing hides the recorder. ``--tokens`` is the number
of rows that a rank's step sends through every layer. 2048 is small: one sequence of a language model, or ten images of
a vision transformer. The recorder's own time does not depend on it.

Two ranks record each step: the first writes all large tensors to the launch's store, and the second finds them there.
If n ranks agree, each writes about 1/n of the tensors.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from plumbline.evidence import trace_file as evidence
from plumbline.evidence.tensor_store import TensorStore
from plumbline.evidence.trace import STORE_ABOVE, RankTrace
from plumbline.worker.recorder.recorder import Recorder


class Timed(Recorder):
    """A recorder that can be paused, and that measures its own time."""

    on = False
    seconds = 0.0

    def step_begins(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        self._timed(partial(super().step_begins, has_closure=has_closure), optimizer)

    def gradients_ready(self, optimizer: Optimizer) -> None:
        self._timed(super().gradients_ready, optimizer)

    def step_ends(self, optimizer: Optimizer) -> None:
        self._timed(super().step_ends, optimizer)

    def _timed(self, record: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        if self.on:
            begun = time.process_time()
            record(optimizer)
            self.seconds += time.process_time() - begun


def stack(parameters: float) -> nn.Sequential:
    """Return a stack of square layers with about ``parameters`` parameters; larger models are wider."""
    width = 2 ** round(math.log2(parameters / 8) / 2 * 0.9)
    depth = max(1, round(parameters / (width * (width + 1))))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    return model


def measure(parameters: float, tokens: int, rounds: int, folder: Path) -> str:
    """Return one line of the table; the store is in ``folder``."""
    model = stack(parameters)
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    first = model[0]
    assert isinstance(first, nn.Linear)
    inputs = torch.randn(tokens, first.in_features)
    ranks = [Timed(TensorStore(str(folder / "tensors"), STORE_ABOVE)) for _ in range(2)]
    for recorder in ranks:
        recorder.install()
        recorder.watch(model)

    def step(on: bool) -> tuple[float, float, float]:
        """Return the seconds of a step, and those of each rank's recorder in it."""
        for recorder in ranks:
            recorder.on, recorder.seconds = on, 0.0
        begun = time.process_time()
        model(inputs).square().mean().backward()
        optimizer.step()
        seconds = time.process_time() - begun
        optimizer.zero_grad()
        return seconds, ranks[0].seconds, ranks[1].seconds

    for on in (False, True):  # the first step is a warm-up, and the first recorded step has no step before it
        step(on)
    plain, writing, finding, stored = [], [], [], []
    for number in range(rounds):
        shutil.rmtree(folder / "tensors", ignore_errors=True)
        for on in (False, True) if number % 2 else (True, False):
            seconds, one, other = step(on)
            if on:
                writing.append(one)
                finding.append(other)
            else:
                plain.append(seconds)
        stored.append(sum(file.stat().st_size for file in folder.glob("tensors/*")))
    own = folder / "rank-0.safetensors"
    evidence.write_rank(str(own), RankTrace(0, 1, tuple(ranks[0].steps)))
    ratios = [
        1 + statistics.median(part / whole for part, whole in zip(parts, plain, strict=True))
        for parts in (writing, finding)
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"| {count:.2e} | {len(list(model.parameters()))} | {2 * 4 * count / 2**20:.4g} "
        f"| {statistics.median(stored) / 2**20:.4g} | {own.stat().st_size / len(ranks[0].steps) / 2**20:.3g} "
        f"| {statistics.median(plain):.3g} | {ratios[0]:.3f} | {ratios[1]:.3f} | {peak:.1f} |"
    )


def main() -> None:
    """Measure every size in its own process, because hooks and memory are per process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, nargs="+", default=[1e5, 1e6, 1e7, 1e8, 1e9])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{options.tokens} tokens a step, medians of {options.rounds} rounds, one thread")
    print("| parameters | tensors | whole MiB | stored MiB | own MiB | plain s | writes | finds | GiB |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for parameters in options.parameters:
        with tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            if child == 0:
                torch.set_num_threads(1)
                print(measure(parameters, options.tokens, options.rounds, Path(folder)), flush=True)
                os._exit(0)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
