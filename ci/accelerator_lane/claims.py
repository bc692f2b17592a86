"""Print what the newest run in a folder says about the documentation's claims on memory and speed.

Exits with 0 if at least one claim was measured, 1 if none was, and 2 if there is no run. Run it in the environment in
which Plumbline is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(folder: Path) -> int:
    """Print the claims as a Markdown table, and each pair of cells that measured one."""
    from plumbline.report.tables.claims import claims
    from plumbline.results.run import read_run

    runs = sorted(folder.glob("*/results.jsonl"), key=lambda path: path.stat().st_mtime)
    runs = [path for path in runs if not path.parent.is_symlink()]
    if not runs:
        print(f"{folder} contains no run: run the stage performance first")
        return 2
    answered = claims(read_run(runs[-1].parent))
    print("| claim | answer | counted | ratio of |\n|---|---|---|---|")
    for claim in answered:
        print(f"| {claim.statement} | {claim.answer} | {claim.counted or '–'} | {claim.measure} |")
    print()
    for claim in answered:
        for pair in claim.pairs:
            told = "" if pair.wrong is None else f"; does not count: {pair.wrong}"
            print(f"- {claim.statement}: {pair.ratio:.3f} ({pair.low:.3f} to {pair.high:.3f}), {pair.conditions}{told}")
    return 0 if any(claim.pairs for claim in answered) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
