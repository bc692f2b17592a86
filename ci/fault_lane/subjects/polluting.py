"""Trainers that change the state of their process during training. The next cell must not notice."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import warnings

import torch
from right import declare


def exits(job):
    """Exit the interpreter."""
    sys.exit(0)


def closes_descriptors(job):
    """Close all descriptors but the standard ones, and open others in their place."""
    os.closerange(3, 1024)
    for _ in range(64):
        os.open(os.devnull, os.O_RDWR)


def closes_standard(job):
    """Close the standard descriptors."""
    os.closerange(0, 3)


def changes_directory(job):
    """Change to a directory that is then removed."""
    place = tempfile.mkdtemp()
    os.chdir(place)
    shutil.rmtree(place)


def changes_environment(job):
    """Clear the environment, and set other variables."""
    os.environ.clear()
    os.environ.update(MASTER_ADDR="nowhere", MASTER_PORT="1", RANK="7", WORLD_SIZE="9", OMP_NUM_THREADS="64")


def changes_torch(job):
    """Change torch's defaults."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(7)
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)


def changes_generators(job):
    """Seed torch's and Python's generators."""
    torch.manual_seed(0)
    random.seed(0)


def changes_signals(job):
    """Ignore all signals that can be ignored, and set an alarm."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.01)


def changes_classes(job):
    """Replace torch's optimizer and loader by wrong ones."""
    torch.optim.SGD.step = lambda self, closure=None: None
    torch.utils.data.DataLoader.__len__ = lambda self: 1
    raise RuntimeError("polluted")


def changes_limits(job):
    """Change the umask, the descriptor limit, garbage collection, warnings and sys.path."""
    os.umask(0o777)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    gc.disable()
    warnings.simplefilter("error")
    sys.path.clear()


def removes_its_output(job):
    """Remove all of Plumbline's files that it has open."""
    for descriptor in os.listdir("/proc/self/fd"):
        place = os.path.realpath(f"/proc/self/fd/{descriptor}")
        if os.path.isfile(place) and "plumbline" in place:
            os.unlink(place)


def signals_its_group(job):
    """Send SIGTERM to its process group, and ignore it itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(0, signal.SIGTERM)


trains = declare("trains", module=__name__)
exit_ = declare("pollutes-exit", exits)
descriptors = declare("pollutes-descriptors", closes_descriptors)
standard = declare("pollutes-standard-descriptors", closes_standard)
directory = declare("pollutes-directory", changes_directory)
environment = declare("pollutes-environment", changes_environment)
defaults = declare("pollutes-torch", changes_torch)
generators = declare("pollutes-generators", changes_generators)
signals = declare("pollutes-signals", changes_signals)
classes = declare("pollutes-classes", changes_classes)
limits = declare("pollutes-limits", changes_limits)
output = declare("pollutes-output", removes_its_output)
group = declare("pollutes-group", signals_its_group)
