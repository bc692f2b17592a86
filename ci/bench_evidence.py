"""What evidence costs: bytes and seconds a step, against the number of parameters.

    python ci/bench_evidence.py [--parameters 1e5 1e6 1e7 1e8 1e9] [--tokens 2048] [--rounds 5]

Steps with and without the recorder take turns in one process of one thread, as a rank has; a ratio compares neighbours,
and the median of the ratios is printed. Seconds are those of the cpu, so that what else runs on the machine counts for
less. A model is a stack of square linear layers with biases, trained by plain SGD:
per parameter and token six operations, as in any dense layer or transformer, and the cheapest of all optimizers, so
that nothing hides the recorder. ``--tokens`` is how many rows a rank's step sends through every layer. 2048 is little:
one sequence of a language model, ten images of a vision transformer; a device is mostly given a multiple of that. The
recorder's own time does not depend on it, so the last column says from how many tokens on it is within 5 %.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from harness.evidence import rank_file as evidence
from harness.evidence.trace import RankTrace
from harness.worker.recording.recorder import Recorder

LIMIT = 1.05


class Switched(Recorder):
    """A recorder that can look away."""

    on = False

    def _before_step(self, *arguments):
        if self.on:
            super()._before_step(*arguments)

    def _after_step(self, *arguments):
        if self.on:
            super()._after_step(*arguments)


def stack(parameters: float) -> nn.Sequential:
    """Return about so many parameters in square layers: wider ones in larger models, as people build them."""
    width = 2 ** round(math.log2(parameters / 8) / 2 * 0.9)
    depth = max(1, round(parameters / (width * (width + 1))))
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=width**-0.5)
    return model


def measure(parameters: float, tokens: int, rounds: int) -> str:
    """Return one line of the table."""
    model = stack(parameters)
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(tokens, model[0].in_features)
    recorder = Switched()
    recorder.install()
    recorder.watch(model)

    def step(on: bool) -> float:
        recorder.on = on
        begun = time.process_time()
        model(inputs).square().mean().backward()
        optimizer.step()
        seconds = time.process_time() - begun
        optimizer.zero_grad()
        return seconds

    for on in (False, True, True):  # the first step of all warms up, and the first recorded one has no step before it
        step(on)
    pairs = []
    for number in range(rounds):
        order = (False, True) if number % 2 else (True, False)
        seconds = {on: step(on) for on in order}
        pairs.append((seconds[False], seconds[True]))
    plain, recorded = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(with_it / without for without, with_it in pairs)
    needed = tokens * (ratio - 1) / (LIMIT - 1)
    bytes_a_step = written(recorder) / len(recorder.steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"| {count:.2e} | {len(list(model.parameters()))} | {2 * 4 * count / 2**20:.4g} | {bytes_a_step / 2**20:.3g} "
        f"| {plain:.3g} | {recorded:.3g} | {ratio:.3f} | {max(needed, 0):.0f} | {peak:.1f} |"
    )


def written(recorder: Recorder) -> int:
    """Return the size of the recorder's evidence as a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.safetensors"
        evidence.write_rank(str(path), RankTrace(0, 1, tuple(recorder.steps)))
        return path.stat().st_size


def main() -> None:
    """Measure every size in a process of its own: hooks and memory are a process's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, nargs="+", default=[1e5, 1e6, 1e7, 1e8, 1e9])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{options.tokens} tokens a step, medians of {options.rounds} rounds, one thread")
    print("| parameters | tensors | whole MiB | kept MiB | plain s | recorded s | ratio | 5 % from tokens | GiB |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for parameters in options.parameters:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            print(measure(parameters, options.tokens, options.rounds), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
