"""What a run was and what it ran on, as names and words."""

from __future__ import annotations

from datetime import timedelta

from pydantic import JsonValue

from harness.machine.fingerprint import Fingerprint
from harness.results.run import Run


def facts(run: Run) -> dict[str, str]:
    """Return what a reader wants to know before the results."""
    header = run.header
    told = {
        "run": header.run_id,
        "started": f"{header.started:%Y-%m-%d %H:%M} UTC",
        "took": _duration(run.footer.finished - header.started) if run.footer else "",
        "machine": machine_in_words(header.fingerprint),
        "software": software_in_words(run),
        "command": " ".join(header.command),
    }
    return {name: value for name, value in told.items() if value}


def software_in_words(run: Run) -> str:
    """Return the versions of plumbline, torch and Python."""
    machine = run.header.fingerprint
    versions = [f"plumbline {run.header.plumbline}"]
    versions += [f"{name} {value}" for name in ("torch", "python") if (value := getattr(machine, name))]
    return ", ".join(versions)


def machine_in_words(machine: Fingerprint) -> str:
    """Return what computed, by number and model."""
    hardware = [f"{machine.key.cpu_cores or '?'} cores of {machine.key.cpu or 'an unknown cpu'}"]
    if machine.key.accelerator == "cuda":
        hardware.insert(0, f"{machine.key.device_count or '?'} × {machine.key.device or 'an unknown device'}")
    return ", ".join(hardware)


def comparability(machine: Fingerprint) -> dict[str, str]:
    """Return the comparability key; what is not there, or was not found, says so."""
    return {
        name.replace("_", " "): "–" if value is None else str(value) for name, value in machine.key.model_dump().items()
    }


def record(run: Run) -> dict[str, str]:
    """Return the rest of the fingerprint but the packages, the run's options, and what each subject ran on."""
    machine = run.header.fingerprint
    told = {
        name: value for name in ("platform", "python", "torch", "pandas", "commit") if (value := getattr(machine, name))
    }
    told |= {"compute capability": machine.compute_capability or "", "cpu governor": machine.cpu_governor or ""}
    told |= {name: f"{value:,.10g}" for name, value in machine.clocks_and_load.items()}
    told |= machine.environment
    told |= {f"subject {name}": str(software) for name, software in run.header.subjects.items()}
    asked = {name: value for name, value in run.header.options.items() if value not in (None, False)}
    told |= {f"--{name.replace('_', '-')}": _option(value) for name, value in asked.items()}
    return {name: value for name, value in told.items() if value}


def seed_in_words(run: Run) -> str:
    """Return which seed the run's weights, data and order came from."""
    seed = run.header.options.get("seed")
    return "the workload's own" if seed is None else str(seed)


def backend_in_words(name: str) -> str:
    """Return what people call a backend."""
    return "one device" if name == "none" else name


def _option(value: JsonValue) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "yes" if value is True else str(value)


def _duration(length: timedelta) -> str:
    seconds = max(0, round(length.total_seconds()))
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
