"""The engines by name. A new engine is one file here, and one entry of ``ENGINES``."""

from __future__ import annotations

import argparse
import difflib

from plumbline.core.errors import PlanError
from plumbline.submit.engine import Engine
from plumbline.submit.engines.kubernetes import KubernetesEngine
from plumbline.submit.engines.ray import RayEngine
from plumbline.submit.engines.slurm import SlurmEngine

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (SlurmEngine, KubernetesEngine, RayEngine)}


def find_engine(options: argparse.Namespace) -> Engine:
    """Return the engine that the options of ``plumbline submit`` name, with its settings, or raise ``PlanError``."""
    name = options.engine
    if name not in ENGINES:
        close = difflib.get_close_matches(name, ENGINES, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(ENGINES)}"
        raise PlanError(f"unknown engine {name!r}: {hint}")
    for other, engine in ENGINES.items():
        for option in sorted(engine.own_options - ENGINES[name].own_options):
            if getattr(options, option):
                raise PlanError(f"--{option} is for --engine {other}, not for {name}")
    return ENGINES[name].of(options)
