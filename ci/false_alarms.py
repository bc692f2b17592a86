"""Trains right trainers on random cells: none of them may be accused.

    python ci/false_alarms.py                      # 200 seeds, a handful of random cells each
    python ci/false_alarms.py --seeds 20 --cells 3 --subject torch
    python ci/false_alarms.py --seeds 100 --subject torch --backends hsdp,tp,ddp+tp,fsdp+tp,ep

Every seed gives the workloads other weights, data and order. Real ranks train every cell, and it is judged. Known
deviations in the files of expectations do not count. Prints each accusation with the command that repeats it and, for
each precision and check, how near right trainers came to the limit. Exits with 1 if a trainer was accused.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from plumbline.core.invocation import suites
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings
from plumbline.launch.pool import Pool
from plumbline.planning.declaration import Declaration
from plumbline.planning.expectation_files import expected, known_of_subject, read_expectations
from plumbline.planning.plan import Matrix, plan


def main() -> int:
    """Draw cells, examine them, and count accusations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--cells", type=int, default=5, help="cells drawn for each seed (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--subject", action="append")
    parser.add_argument("--backends", metavar="A,B", help="draw only cells of these backends")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pools = {locator: Pool(locator) for locator in arguments.subject or ["reference", "torch"]}
    declarations = [Declaration.of(locator, values) for locator, pool in pools.items() for values in pool.subjects]
    locators = {declared.name: declared.locator for declared in declarations}
    matrix = Matrix(gpus=arguments.gpus, backends=arguments.backends and tuple(arguments.backends.split(",")))
    cells = [planned.cell for planned in plan(matrix, declarations) if planned.refusal is None]
    files = read_expectations(suites() / "expectations")
    expectations = {one.name: known_of_subject(one.name, one.software, files) for one in declarations}
    worst: dict[tuple[str, str], tuple[float, str]] = defaultdict(lambda: (0.0, ""))
    tried = 0
    accused: list[str] = []
    try:
        for seed in range(arguments.seeds):
            for cell in random.Random(seed).sample(cells, min(arguments.cells, len(cells))):
                tried += 1
                folder = Path(tempfile.mkdtemp())
                seeded = replace(cell, seed=seed)
                findings = examine(pools[locators[cell.subject]], seeded, folder, Settings(60)).findings
                known = expected(cell, findings, expectations[cell.subject])
                for finding, reason in zip(findings, known, strict=True):
                    if finding.outcome.is_bad and reason is None:
                        accused.append(f"{cell.id} --seed {seed}: {finding.check}: {finding.message}")
                        print(f"ACCUSED {accused[-1]}", flush=True)
                    elif not finding.outcome.is_bad and finding.error_x_noise is not None:
                        key = (cell.precision, finding.check)
                        worst[key] = max(worst[key], (finding.error_x_noise, f"{cell.id} --seed {seed}"))
                shutil.rmtree(folder)
    finally:
        for pool in pools.values():
            pool.close()
    print(f"{'precision':>9}  {'check':<12} {'worst right × noise':>20}  where")
    for (precision, check), (error, where) in sorted(worst.items()):
        print(f"{precision:>9}  {check:<12} {error:>20.2f}  {where}")
    print(f"In all: {arguments.seeds} seeds, {tried} cells trained, {len(accused)} false alarms")
    return 1 if accused else 0


if __name__ == "__main__":
    sys.exit(main())
