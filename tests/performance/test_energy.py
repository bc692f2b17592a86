"""Energy is read from the driver's counters of the used devices, in the timed rounds."""

from __future__ import annotations

import pytest

from plumbline.benchmark.launch_metrics import samples_of
from plumbline.benchmark.timed_launch import EnergyUse, LaunchSample, LaunchTimings
from plumbline.evidence.timing import RankTiming, Round
from plumbline.machine.hardware import EnergyMeter, NoEnergyError, meter_of

DEVICES = ("GPU-one", "GPU-other", "GPU-old")


class Driver:
    """Answers like NVML: the counters of three GPUs, 250 mJ more at each reading; the last GPU has none."""

    def __init__(self, *, initialises=0):
        self.initialises = initialises
        self.readings = 0

    def nvmlInit_v2(self):  # noqa: N802
        return self.initialises

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        count._obj.value = len(DEVICES)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetUUID(self, handle, uuid, length):  # noqa: N802
        name = DEVICES[handle.value - 1].encode()
        assert len(name) < length.value
        uuid.value = name
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, counter):  # noqa: N802
        if handle.value == len(DEVICES):
            return 3  # NVML_ERROR_NOT_SUPPORTED
        self.readings += 1
        counter._obj.value = 10**9 * handle.value + 250 * self.readings
        return 0


def test_a_meter_reads_joules_by_the_uuid_of_the_device():
    meter = EnergyMeter(lambda name: Driver())
    assert meter.read() == {"GPU-one": pytest.approx(1e6 + 0.25), "GPU-other": pytest.approx(2e6 + 0.5)}


def test_a_driver_that_refuses_is_a_reason():
    with pytest.raises(NoEnergyError, match=r"nvmlInit_v2 failed with error 9"):
        EnergyMeter(lambda name: Driver(initialises=9))

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    with pytest.raises(NoEnergyError, match=r"libnvidia-ml\.so\.1 cannot be opened"):
        EnergyMeter(absent)


def rank(number, *devices, seconds=2.0):
    ended = (seconds / 2, seconds)
    return RankTiming(number, Round(0.0, (0.0,), (0.5,), ()), (Round(0.0, (0.0,), ended, (number,)),), devices=devices)


def used(*counters):
    """Return the energy of a launch with a round between each two of these readings."""
    readings = iter(counters)
    use = EnergyUse(lambda: next(readings))
    for _ in range(len(counters) // 2):
        use.begin_round()
        use.end_round()
    return use


def test_what_is_consumed_between_rounds_does_not_count_nor_do_other_devices():
    use = used({"a": 0.0, "b": 0.0}, {"a": 3.0, "b": 9.0}, {"a": 50.0, "b": 60.0}, {"a": 54.0, "b": 61.0})
    assert use.of([rank(0, "a")]) == pytest.approx(3 + 4)
    assert use.of([rank(0, "a"), rank(1, "a")]) == pytest.approx(3 + 4), "ranks that share a device"
    assert use.of([rank(0, "a"), rank(1, "b")]) == pytest.approx(3 + 4 + 9 + 1)


def test_where_energy_is_not_known_there_is_a_reason():
    use = used({"a": 0.0}, {"a": 3.0})
    assert "no energy counter" in use.of([rank(0, "a"), rank(1, "b")])
    assert "UUID" in use.of([rank(0)])
    assert "a round takes 0.5 s" in use.of([rank(0, "a", seconds=0.5)])
    simulated = EnergyUse(meter_of("cpu"))
    simulated.begin_round()
    assert simulated.of([rank(0)]) == "simulated devices have no energy counter"


def test_energy_is_told_of_a_step_and_of_a_sample():
    ranks = (rank(0, "a"), rank(1, "b"))
    found = samples_of([LaunchSample(LaunchTimings(ranks, 1.0, energy=10.0))], 2)
    assert found["energy_per_step", None] == [pytest.approx(10 / 2)]
    assert found["energy_per_sample", None] == [pytest.approx(10 / 2)]
    assert ("energy_per_step", None) not in samples_of([LaunchSample(LaunchTimings(ranks, 1.0, energy="why"))], 2)
