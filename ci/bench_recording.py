"""Measures how many times longer a recorded optimizer step takes than a plain one.

    python ci/bench_recording.py                                   # three models on 2 ranks, 5 rounds
    python ci/bench_recording.py --models gpt --rounds 3 --ranks 1

Each round starts new ranks, which train a small model with DistributedDataParallel: some plain steps, then recorded
steps under ``plumbline.attach``, then plain steps again, so other work on the machine affects both. CPU seconds of rank
0 are divided by the median of its plain steps. In the first recorded step, gradients are recomputed in float64; in a
later one, only if it may show something new. The table has both, and the mean over the 4 steps that ``plumbline check``
records by default: each with its median, and its range over all rounds. Needs `pip install transformers`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import plumbline

STEPS = 4
WORDS, LENGTH, ROWS, IMAGES = 64, 64, 12, 16

Loss = Callable[[nn.Module], Tensor]


def gpt() -> tuple[nn.Module, Loss]:
    """Return GPT-2 with 0.8 million parameters, and its loss on a random batch."""
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4)
    return transformers.GPT2LMHeadModel(config), _of_words


def llama() -> tuple[nn.Module, Loss]:
    """Return Llama with 9.5 million parameters, and its loss on a random batch."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _of_words


def resnet() -> tuple[nn.Module, Loss]:
    """Return ResNet-18 with 11.2 million parameters, and its loss on random images."""
    config = transformers.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    return transformers.ResNetForImageClassification(config), _of_images


def _of_words(model: nn.Module) -> Tensor:
    words = torch.randint(WORDS, (ROWS, LENGTH))
    loss: Tensor = model(input_ids=words, labels=words).loss
    return loss


def _of_images(model: nn.Module) -> Tensor:
    loss: Tensor = model(pixel_values=torch.randn(IMAGES, 3, 96, 96), labels=torch.randint(10, (IMAGES,))).loss
    return loss


MODELS = {one.__name__: one for one in (gpt, resnet, llama)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each model, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS], help="models (default: all)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each training (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="trainings of each model (default: %(default)s)")
    asked = parser.parse_args(arguments)
    print("| model | plain step, ms | first recorded ÷ plain | later recorded ÷ plain | mean of 4 ÷ plain |")
    print("|---|--:|--:|--:|--:|", flush=True)
    later = []
    for name in asked.models:
        rounds = [measure(name, asked.ranks) for _ in range(asked.rounds)]
        plain, *ratios = zip(*rounds, strict=True)
        print(f"| {name} | {1000 * statistics.median(plain):.0f} | {' | '.join(map(_interval, ratios))} |", flush=True)
        later.append(f"{name} × {statistics.median(ratios[1]):.2f}")
    print(f"In all: a recorded step takes {', '.join(later)} of a plain one's time")
    return 0


def measure(name: str, ranks: int) -> tuple[float, float, float, float]:
    """Train on new ranks; return the seconds of a plain step, and the ratios of the first, later and all steps."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        found = multiprocessing.get_context("spawn").SimpleQueue()
        start_processes(_train, (name, ranks, f"file://{folder}/meeting", found), ranks)  # type: ignore[no-untyped-call]
        plain, recorded = found.get()
    usual = statistics.median(plain)
    return usual, recorded[0] / usual, statistics.median(recorded[1:]) / usual, statistics.mean(recorded) / usual


def _train(rank: int, name: str, ranks: int, meeting: str, found: Any) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    model, loss = MODELS[name]()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = _steps(lambda: loss(wrapped), optimizer)
    _ = [next(steps) for _ in range(3)]  # DDP rebuilds buckets; memory is allocated
    plain = [next(steps) for _ in range(2 * STEPS)]
    with plumbline.attach(optimizer, steps=STEPS) as attached:
        recorded = [next(steps) for _ in range(STEPS)]
        assert attached.is_complete
    plain += [next(steps) for _ in range(2 * STEPS)]
    if rank == 0:
        found.put((plain, recorded))
    dist.destroy_process_group()


def _steps(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """Train, and yield the CPU seconds of each step."""
    while True:
        begun = time.process_time()
        torch.autograd.backward(loss())
        optimizer.step()
        optimizer.zero_grad()
        yield time.process_time() - begun


def _interval(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} – {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
