"""What a machine reports about itself is recorded; missing answers are left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plumbline.machine import hardware
from plumbline.machine.fingerprint import take_fingerprint


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put an ``nvidia-smi`` on the path that answers each query as given, and fails for others."""

    def put(**answers: str) -> None:
        cases = "\n".join(f"  *{query}*) printf '{said}' ;;" for query, said in answers.items())
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\n  *) exit 2 ;;\nesac\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


def test_clocks_and_load_of_gpus_are_figures_with_units(nvidia_smi) -> None:
    nvidia_smi(utilization="1980, 1980, 2619, 97, 1024\\n1200, 1980, 2619, 0, [N/A]\\n")
    found = hardware.clocks_and_load()
    assert found["gpu 0: sm, MHz"] == 1980
    assert found["gpu 0: busy, %"] == 97
    assert found["gpu 1: sm, MHz"] == 1200
    assert "gpu 1: memory in use, MiB" not in found, "what is not known has no figure"


def test_the_least_able_gpu_counts(nvidia_smi) -> None:
    nvidia_smi(compute_cap="9.0\\n10.0\\n8.6\\n")
    assert take_fingerprint("cuda").compute_capability == "8.6"


@pytest.mark.parametrize("said", ["", "nonsense\\n", "one, two, three\\n", "9.0, 8.0\\n"])
def test_an_answer_that_makes_no_sense_is_none(nvidia_smi, said: str) -> None:
    nvidia_smi(compute_cap=said, utilization=said)
    assert take_fingerprint("cuda").compute_capability is None
    assert not [name for name in hardware.clocks_and_load() if name.startswith("gpu")]


def test_a_name_with_a_comma_stays_whole(nvidia_smi) -> None:
    nvidia_smi(driver_version="NVIDIA, A, 570.1\\n")
    assert hardware.gpu_rows("name", "driver_version") == [["NVIDIA, A", "570.1"]]


def test_without_the_tool_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpu_rows("name") == []


def test_the_record_has_what_pip_lists() -> None:
    packages = take_fingerprint("cpu").packages
    assert packages["pytest"] == pytest.__version__
    assert list(packages) == sorted(packages)


def test_the_load_is_that_of_the_machine() -> None:
    assert hardware.clocks_and_load()["load average over 1 min"] >= 0
