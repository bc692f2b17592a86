"""Runs random right trainings under the recorder of ``plumbline check``. Every accusation is a false alarm.

    python ci/check_random.py --count 500            # seeds 0 to 499
    python ci/check_random.py --seed 17 --verbose    # one seed, with all findings

Ranks are forked from this process, which has imported torch, so a training takes about a second.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from random_trainings import Settings, train

import torch._dynamo  # isort: skip  # DistributedDataParallel imports it; this does so once for all ranks
from torch._C._distributed_c10d import FileStore

from plumbline.check.evidence.options import RecordingOptions, write_options
from plumbline.check.judge.script_checks import judged_trainings
from plumbline.check.rank.install import make_recorder
from plumbline.core.finding import Finding
from plumbline.core.outcome import Outcome


def main() -> int:
    """Return 1 if a training was accused or could not be recorded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.count)
    outcomes: Counter[str] = Counter()
    accused = 0
    for seed in seeds:
        settings = Settings.drawn(seed)
        findings = checked(settings)
        bad = [one for one in findings if one.outcome.is_bad]
        accused += bool(bad)
        gradients = [one for one in findings if one.check == "gradients"]
        outcomes[gradients[0].outcome.value if gradients else "none"] += 1
        for one in findings if options.verbose else bad:
            print(
                f"seed {seed}: {one.check} {one.outcome.value} {one.cause}: {one.message}\n    {settings}", flush=True
            )
        if not options.verbose and gradients and gradients[0].outcome is Outcome.SKIPPED:
            print(f"seed {seed}: {gradients[0].message}\n    {settings}", flush=True)
        if not gradients:
            print(f"seed {seed}: nothing was judged\n    {settings}", flush=True)
    print(f"{len(seeds)} trainings: {accused} accused; gradients: {dict(outcomes)}")
    return int(accused > 0 or outcomes["none"] > 0)


def checked(settings: Settings) -> list[Finding]:
    """Return the findings about one training."""
    with tempfile.TemporaryDirectory(prefix="plumbline-random-") as folder:
        write_options(Path(folder), RecordingOptions())
        ranks = [_fork(settings, rank, folder) for rank in range(settings.world)]
        for pid in ranks:
            os.waitpid(pid, 0)
        return [finding for one in judged_trainings(Path(folder)) for finding in one.findings]


def _fork(settings: Settings, rank: int, folder: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        recorder = make_recorder(folder)
        recorder.install()
        if settings.world > 1:
            store = FileStore(f"{folder}/store", settings.world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.world)
        train(settings, rank)
        recorder.finish()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
