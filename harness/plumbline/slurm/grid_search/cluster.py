"""Submits the trials of a search as one job array, and runs the trial of each array task."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plumbline.slurm.grid_search.hyperparameters import Hyperparameters, SearchError
from plumbline.slurm.scheduler import sbatch
from plumbline.slurm.script import BatchScript

TRIALS = "PLUMBLINE_TRIALS"
"""The environment variable, in a trial's job, with the file of the trials' hyper-parameters."""


class SlurmCluster:
    """One search on a SLURM cluster.

    Each rank of each trial runs the submitting script again, with the same arguments: there
    ``optimize_parallel_cluster_gpu`` calls ``main`` with the trial's hyper-parameters instead of submitting.

    Args:
        hyperparam_optimizer: what ``HyperOptArgumentParser.parse_args`` returned.
        log_path: a folder for scripts and logs that all nodes can access.
        python_cmd: the interpreter, by default this one.

    Attributes:
        per_experiment_nb_nodes, per_experiment_nb_gpus: nodes of a trial, and devices (and ranks) of each node.
        job_time: a trial's time limit in SLURM's notation; None: the cluster's default.
    """

    def __init__(
        self, hyperparam_optimizer: Hyperparameters, log_path: str | Path, python_cmd: str = sys.executable
    ) -> None:
        self.hyperparam_optimizer = hyperparam_optimizer
        self.log_path = Path(log_path)
        self.python_cmd = python_cmd
        self.per_experiment_nb_nodes = 1
        self.per_experiment_nb_gpus = 1
        self.job_time: str | None = None
        self._modules: list[str] = []
        self._commands: list[str] = []
        self._options: dict[str, str | int | None] = {}
        self._comments: dict[str, str] = {}

    def load_modules(self, modules: list[str]) -> None:
        """Load modules in each trial's job."""
        self._modules += modules

    def add_command(self, command: str) -> None:
        """Run a line of shell in each trial's job, before the trial."""
        self._commands.append(command)

    def add_slurm_cmd(self, cmd: str, value: str | int | None, comment: str = "") -> None:
        """Set an option of sbatch, by its long name without dashes; the comment goes into the script."""
        self._options[cmd] = value
        if comment:
            self._comments[cmd] = comment

    def optimize_parallel_cluster_gpu(
        self, main: Callable[[argparse.Namespace], Any], nb_trials: int | None, job_name: str
    ) -> int | None:
        """Submit a job array of at most ``nb_trials`` trials and return its id; in a trial, call ``main`` instead.

        Raises:
            SearchError: no argument is tunable, or the program is not a script file that a trial can run.
            PlanError, SchedulerError: the batch script cannot be written, or sbatch failed.
        """
        if TRIALS in os.environ:
            trials = json.loads(Path(os.environ[TRIALS]).read_text())
            main(self.hyperparam_optimizer.trial(trials[int(os.environ["SLURM_ARRAY_TASK_ID"])]))
            return None
        trials = self.hyperparam_optimizer.trials(nb_trials)
        script = Path(sys.argv[0])
        if not script.is_file():
            raise SearchError(f"each trial runs the script that submits it, and {sys.argv[0]!r} is not a file")
        folder = (self.log_path / job_name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "trials.json"
        file.write_text(json.dumps(trials, indent=1))
        batch = self._batch(folder, job_name, len(trials), script.resolve(), file)
        (folder / "batch.sh").write_text(batch.text())
        job = sbatch(batch.text())
        print(f"job {job}: {len(trials)} trials, logs in {folder}")
        return job

    def _batch(self, folder: Path, job_name: str, trials: int, script: Path, file: Path) -> BatchScript:
        options: dict[str, str | int | None] = {
            "job-name": job_name,
            "nodes": self.per_experiment_nb_nodes,
            "ntasks-per-node": self.per_experiment_nb_gpus,
            "gpus-per-node": self.per_experiment_nb_gpus,
            "array": f"0-{trials - 1}",
            "output": str(folder / "trial-%a-%A.txt"),
        }
        if self.job_time is not None:
            options["time"] = self.job_time
        return BatchScript(
            options={**options, **self._options},
            comments={"ntasks-per-node": "One task for each rank, one rank for each device.", **self._comments},
            modules=tuple(self._modules),
            commands=tuple(self._commands),
            environment={TRIALS: str(file)},
            folder=str(Path.cwd()),
            command=f"srun {shlex.join([self.python_cmd, str(script), *sys.argv[1:]])}",
        )
