"""Hyper-parameter searches on a SLURM cluster: a trial is an array task, and each of its ranks runs the script."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from plumbline.core.errors import PlumblineError
from plumbline.slurm.scheduler import BatchScript, sbatch


class SearchError(PlumblineError):
    """A search is not possible with these arguments."""


class Hyperparameters(argparse.Namespace):
    """Parsed arguments, as argparse returns them, with the trials of a search."""

    def __init__(self, values: argparse.Namespace, options: dict[str, tuple[Any, ...]], search: str, seed: int) -> None:
        super().__init__(**vars(values))
        self._search = (options, search, seed)

    def trials(self, nb_trials: int | None = None) -> list[dict[str, Any]]:
        """Return the tunable arguments of each trial, at most ``nb_trials`` of them (None: all), without duplicates.

        ``grid_search`` iterates over the options in the order in which the arguments were added, the last one fastest;
        ``random_search`` samples with the parser's seed.

        Raises:
            SearchError: no argument is tunable, or ``nb_trials`` is less than one.
        """
        options, search, seed = self._search
        if not options:
            raise SearchError("there is nothing to search: add arguments with opt_list(…, options=[…], tunable=True)")
        if nb_trials is not None and nb_trials < 1:
            raise SearchError(f"nb_trials={nb_trials}: at least one trial is needed")
        every = math.prod(map(len, options.values()))
        wanted = every if nb_trials is None else min(nb_trials, every)
        if search == "grid_search":
            chosen: Iterable[tuple[Any, ...]] = itertools.islice(itertools.product(*options.values()), wanted)
        else:
            numbers = random.Random(seed).sample(range(every), wanted)
            chosen = (_combination(number, list(options.values())) for number in numbers)
        return [dict(zip(options, values, strict=True)) for values in chosen]

    def trial(self, values: dict[str, Any]) -> argparse.Namespace:
        plain = {name: value for name, value in vars(self).items() if name != "_search"}
        return argparse.Namespace(**{**plain, **values})


class HyperOptArgumentParser(argparse.ArgumentParser):
    """An argparse parser whose arguments can have several options to try.

    Args:
        strategy: ``"grid_search"`` or ``"random_search"``.
        seed: the seed of a random search.
        settings: further arguments of ``argparse.ArgumentParser``.

    Raises:
        SearchError: there is no such strategy.
    """

    def __init__(self, strategy: str = "grid_search", seed: int = 0, **settings: Any) -> None:
        if strategy not in ("grid_search", "random_search"):
            raise SearchError(f"unknown strategy {strategy!r}: use 'grid_search' or 'random_search'")
        super().__init__(**settings)
        self._strategy, self._seed = strategy, seed
        self._options: dict[str, tuple[Any, ...]] = {}

    def opt_list(self, *names: str, options: Sequence[Any], tunable: bool = True, **settings: Any) -> None:
        """Add an argument; if it is ``tunable``, each of its ``options`` is tried.

        Raises:
            SearchError: it is tunable, and has no options or the same one twice.
        """
        action = self.add_argument(*names, **settings)
        if not tunable:
            return
        if not options or len(set(map(repr, options))) < len(options):
            raise SearchError(f"{names[0]}: give at least one option, and each only once, not {list(options)}")
        self._options[action.dest] = tuple(options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments, as argparse does, with the trials of the search."""
        return Hyperparameters(super().parse_args(args, namespace), dict(self._options), self._strategy, self._seed)


def _combination(number: int, options: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the options of a trial of the grid, which can be too large to iterate over."""
    found: list[Any] = []
    for choices in reversed(options):
        number, index = divmod(number, len(choices))
        found.insert(0, choices[index])
    return tuple(found)


TRIALS = "PLUMBLINE_TRIALS"
"""The environment variable of a trial's job that names the file with the trials' hyper-parameters."""


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


__all__ = ["HyperOptArgumentParser", "Hyperparameters", "SlurmCluster"]
