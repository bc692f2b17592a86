"""Ways to bound a check's memory: a part of the parameters, float32 replays, and a refusal that names both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from plumbline.check.evidence.options import RecordingOptions
from plumbline.check.evidence.training import segment
from plumbline.check.rank import memory_needed
from plumbline.check.rank.memory_needed import NotEnoughMemoryError, free_bytes, needed_bytes, require_memory
from plumbline.check.rank.parameter_sample import ParameterSample
from plumbline.cli.main import main
from plumbline.replay.exact_gradients import ExactGradients
from plumbline.replay.precision import ReplayPrecision

sys.path.insert(0, str(Path(__file__).parent))
from replaying import Recording

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 9), torch.nn.Linear(9, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(5):
    for micro_batch in range(2):
        (model(torch.randn(8, 64)).square().mean() / 2).backward()
    optimizer.step()
    if "--kept" not in sys.argv:
        optimizer.zero_grad()
print("trained")
"""


def model_of(entries: int = 1000) -> nn.Module:
    return nn.Sequential(nn.Linear(entries, 8, bias=False), nn.Linear(8, 1))


TRUTHS = ("float64", "float32")


@pytest.mark.parametrize(("amount", "count"), [(0.0, 10), (0.25, 3), (0.01, 1), (4, 4), (99, 10)])
def test_a_sample_has_as_many_parameters_as_asked_for_and_always_the_same(amount, count):
    parameters = [torch.zeros(3) for _ in range(10)]
    chosen = []
    for _ in range(2):
        sample = ParameterSample(amount)
        sample.add(parameters)
        chosen.append([sample.has(one) for one in parameters])
    assert chosen[0] == chosen[1]
    assert sum(chosen[0]) == count


def test_replays_in_float32_take_less_memory_than_in_float64():
    layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(20))
    parameters = list(layers.parameters())
    needed = [needed_bytes(parameters, parameters, ParameterSample(0), RecordingOptions(truth=one)) for one in TRUTHS]
    assert needed[0] > needed[1]
    assert needed[0] <= 3 * sum(one.numel() * one.element_size() for one in parameters)


def test_where_memory_lacks_the_option_that_helps_is_named(monkeypatch):
    model, options = model_of(10**6), RecordingOptions()
    parameters = list(model.parameters())
    # 8 million entries: 0.128 GB in float64 with the largest gradient, and 0.416 GB for their update
    for free, words in ((300_000_000, "--sample-parameters 0.1 it needs"), (100_000_000, "--truth float32 --sample")):
        monkeypatch.setattr(memory_needed, "free_bytes", lambda device, free=free: free)
        with pytest.raises(NotEnoughMemoryError, match=words):
            require_memory([model], parameters, ParameterSample(0), options)
    monkeypatch.setattr(memory_needed, "free_bytes", lambda device: 1000)
    with pytest.raises(NotEnoughMemoryError, match="even with --truth float32"):
        require_memory([model], parameters, ParameterSample(0), options)
    monkeypatch.setattr(memory_needed, "free_bytes", lambda device: None)
    require_memory([model], parameters, ParameterSample(0), options)


def test_the_cpu_says_how_much_is_free():
    free = free_bytes(torch.device("cpu"))
    assert free is None or free > 0


def test_float32_truth_computes_in_float32_and_float64_stays_what_it_is():
    narrow, wide = (torch.bfloat16, torch.float32, torch.float64, torch.int64), ReplayPrecision.FLOAT32.wide
    assert [wide(one) for one in narrow] == [torch.float32, torch.float32, torch.float64, torch.int64]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.Dropout(0.5), nn.Linear(16, 1)).bfloat16()
    exact = {}
    for truth in (ReplayPrecision.FLOAT64, ReplayPrecision.FLOAT32):
        torch.manual_seed(1)
        recorded = Recording()
        recorded._exact = ExactGradients(recorded.calls, lambda gradient, parameter: gradient.clone(), truth)
        recorded.calls.start()
        try:
            recorded.backward(model(torch.ones(4, 32).bfloat16()).sum())
            exact[truth], uncovered = recorded.total()
        finally:
            recorded.calls.stop()
        assert not uncovered
    for parameter, gradient in exact[ReplayPrecision.FLOAT32].items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), exact[ReplayPrecision.FLOAT64][parameter], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [65, 5000, 300_000])
def test_a_projection_of_whole_float64_numbers_differs_by_rounding_alone(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    apart = (segment(values, split=False) - segment(values)).norm()
    assert float(apart) <= 2.0**-50 * size**0.5 * float(values.norm())


@pytest.mark.parametrize(("mistake", "code"), [((), 0), (("--kept",), 1)])
@pytest.mark.parametrize("option", [("--sample-parameters", "0.4"), ("--truth", "float32")])
def test_a_sample_and_float32_truth_judge_like_everything_in_float64(option, mistake, code, tmp_path, capfd):
    script, file = tmp_path / "train.py", tmp_path / "verdict.json"
    script.write_text(SCRIPT)
    command = ["check", *option, "--json", str(file), "--", sys.executable, str(script), *mistake]
    assert main(command) == code
    assert capfd.readouterr().out == "trained\n"
    (one,) = json.loads(file.read_text())["trainings"]
    share = one["coverage"]["replayed"]
    assert 0 < share < 1 if option[0] == "--sample-parameters" else share == 1


def test_a_training_goes_on_where_replays_are_refused(plumbline, monkeypatch):
    monkeypatch.setattr(memory_needed, "free_bytes", lambda device: 1000)

    def train():
        layer = nn.Linear(64, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            layer(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        return "trained"

    checked = plumbline.check(train, ranks=1)
    assert checked.values == ["trained"]
    assert not checked.trainings
