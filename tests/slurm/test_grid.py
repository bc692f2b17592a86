"""The old docs' search: a 3 × 3 grid is nine jobs, and each trains with the Trainer over its nodes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GRID = Path(__file__).parent / "subjects" / "grid.py"


def test_a_grid_of_nine_trials_trains_on_two_nodes_each(cluster, tmp_path):
    done = subprocess.run([sys.executable, GRID, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    job = re.match(r"job (\d+): 9 trials", done.stdout)[1]
    cluster.ask("srun", "--quiet", "--partition=main", f"--dependency=afterany:{job}", "true")
    logs = "\n".join(f"{log.name}: {log.read_text()}" for log in sorted((tmp_path / "grid").glob("trial-*.txt")))
    states = set(cluster.ask("squeue", "-h", "--array", "--states=all", f"--jobs={job}", "--format=%T").split())
    assert states == {"COMPLETED"}, logs
    found = {place.name: float(place.read_text()) for place in tmp_path.iterdir() if "-of-" in place.name}
    # Four samples over two ranks in batches of two: one step, in which each rank's gradient is the factor.
    assert found == {
        f"{rate}-{factor}-{rank}-of-2": -rate * factor
        for rate in (0.5, 0.25, 0.125)
        for factor in (1, 2, 4)
        for rank in (0, 1)
    }, logs
    script = (tmp_path / "grid" / "batch.sh").read_text().splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --array=0-8", "# one task a gpu", "#SBATCH --gpus-per-node=1"} <= set(script)
