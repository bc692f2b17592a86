"""``pytest suites/`` runs the conformance suite. The other suites run only if their path is named.

This file loads Plumbline's pytest plugin. An entry point would add its options to every pytest run in the environment
instead. If ``suites/``, or something in it, is named, pytest reads this file before it parses options.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import plumbline.pytest_plugin.plugin

ONLY_BY_NAME = tuple(Path(__file__).parent.resolve() / name for name in ("detection", "performance"))


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Load the plugin, unless ``-p`` did so already."""
    if not pluginmanager.is_registered(plumbline.pytest_plugin.plugin):
        pluginmanager.register(plumbline.pytest_plugin.plugin, "plumbline.pytest_plugin.plugin")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the folders in ``ONLY_BY_NAME`` unless the command line names them or something in them."""
    folder = next((one for one in ONLY_BY_NAME if one in (collection_path, *collection_path.parents)), None)
    if folder is None:
        return None
    base = config.invocation_params.dir
    named = [(base / argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(folder in (path, *path.parents) for path in named) else True
