"""Valid values of ``gpus=``."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.devices.calls import driver_started
from plumbline.trainer import MisconfigurationError
from plumbline.trainer.connector import make_visible, parse_gpus

indices = st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True)


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        (None, ()),
        (0, ()),
        ([], ()),
        (3, (0, 1, 2)),
        (-1, (0, 1, 2, 3)),
        ("-1", (0, 1, 2, 3)),
        ("3", (3,)),
        ("0,", (0,)),
        (" 0, 1 ", (0, 1)),
        ([2, 0], (2, 0)),
        ((1,), (1,)),
    ],
)
def test_means(gpus, devices):
    assert parse_gpus(gpus, 4) == devices


@pytest.mark.parametrize(
    "gpus",
    ["0,,1", "", "a", "0 1", "-2", "0,0", ",", [0, 0], [-1], [True], [0.0], -2, True, False, 1.5, {0}, b"0"],
)
def test_refuses(gpus):
    with pytest.raises(MisconfigurationError, match="gpus="):
        parse_gpus(gpus, 4)


@given(indices)
def test_a_string_is_the_list_it_spells(devices):
    assert parse_gpus(", ".join(map(str, devices)), 1) == tuple(devices) == parse_gpus(devices, 1)


@given(st.integers(0, 64))
def test_a_number_is_a_count(count):
    assert parse_gpus(count, 1) == tuple(range(count))


@given(st.text(max_size=12))
def test_any_other_text_is_refused_in_a_sentence(text):
    if set(text) - set("0123456789, -"):
        with pytest.raises(MisconfigurationError, match=r"\.$"):
            parse_gpus(text, 4)


class Driver:
    """The used parts of the CUDA driver."""

    def __init__(self, answer: int) -> None:
        self.cuDeviceGetCount = lambda count: answer


@pytest.mark.parametrize(("answer", "started"), [(3, False), (0, True), (100, True)])
def test_the_driver_says_whether_it_was_started(monkeypatch, answer, started):
    monkeypatch.setattr("ctypes.CDLL", lambda name, mode: Driver(answer))
    assert driver_started() is started


def test_a_driver_that_is_not_loaded_is_not_started(monkeypatch):
    def missing(name, mode):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert driver_started() is False


@pytest.mark.cuda
def test_the_real_driver_is_started_by_torch_and_not_by_counting_devices():
    script = "import torch; from plumbline.devices.calls import driver_started as started;"
    script += "print(torch.cuda.device_count() > 0, started(), torch.cuda.init(), started())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "None", "True"]


def test_shows_the_devices_that_were_asked_for():
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert make_visible("cuda", (1, 3), None, False) == ({**order, "CUDA_VISIBLE_DEVICES": "1,3"}, (0, 1))
    assert make_visible("cuda", (1, 0), "4,7", False) == ({**order, "CUDA_VISIBLE_DEVICES": "7,4"}, (0, 1))
    assert make_visible("cuda", (1, 3), None, True) == ({}, (1, 3))
