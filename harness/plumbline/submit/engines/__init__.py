"""The engines by name. A new engine is one file here, and one entry of ``ENGINES``."""

from __future__ import annotations

import argparse

from plumbline.core.named_registry import check_choice
from plumbline.submit.engine import Engine
from plumbline.submit.engines.kubernetes import KubernetesEngine
from plumbline.submit.engines.ray import RayEngine
from plumbline.submit.engines.slurm import SlurmEngine

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (SlurmEngine, KubernetesEngine, RayEngine)}


def find_engine(options: argparse.Namespace) -> Engine:
    """Return the engine that the options of ``plumbline submit`` name, with its settings, or raise ``PlanError``."""
    check_choice("engine", options.engine, {name: engine.own_options for name, engine in ENGINES.items()}, options)
    return ENGINES[options.engine].of(options)
