"""A rank's file reads back as it was written; a damaged file raises a TraceError and nothing else."""

from __future__ import annotations

import contextlib
import gc
import json
import struct
import sys

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plumbline.core.errors import TraceError
from plumbline.evidence.read import read_file, read_rank
from plumbline.evidence.trace import MicroBatch, RankTrace, Step
from plumbline.evidence.trace_file import flatten, write_rank

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool]
SHARED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensors():
    shapes = st.lists(st.integers(0, 3), max_size=3)

    def drawn(dtype, shape, seed):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
        return values.to(dtype)

    return st.builds(drawn, st.sampled_from(DTYPES), shapes, st.integers(0, 1000))


def bits(trace):
    values, found = flatten(trace)
    return values, {name: (t.dtype, t.shape, t.contiguous().view(-1).tolist()) for name, t in found.items()}


def trace_of(parameters, error=None):
    micro = MicroBatch(((0, 1), (2,)), (0, 1, 2))
    step = Step((micro,), parameters, parameters, dict(parameters), (0.1,), False, 65536.0)
    return RankTrace(3, 4, (step,), error, 1.5 if error else None)


@pytest.fixture
def whole(tmp_path):
    """A small complete file, as bytes, and the trace in it."""
    trace = trace_of({"weight": torch.tensor([[1.0, -2.5]]), "bias": torch.tensor(0.5)})
    write_rank(str(tmp_path / "rank.safetensors"), trace)
    return (tmp_path / "rank.safetensors").read_bytes(), trace


@SHARED_FOLDER
@given(st.dictionaries(st.text("abc./é", min_size=1, max_size=6), tensors(), max_size=4), st.none() | st.text())
def test_what_was_written_is_read(tmp_path, parameters, error):
    path, trace = tmp_path / "rank.safetensors", trace_of(parameters, error)
    write_rank(str(path), trace)
    assert bits(read_rank(path)) == bits(trace)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (2, 3)], ids=str)
def test_every_dtype_and_shape_is_kept(tmp_path, dtype, shape):
    trace = trace_of({"weight": torch.ones(shape).to(dtype)})
    write_rank(str(tmp_path / "rank"), trace)
    assert bits(read_rank(tmp_path / "rank")) == bits(trace)


def test_numbers_that_are_not_finite_are_kept(tmp_path):
    weight = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    write_rank(str(tmp_path / "rank"), trace_of({"weight": weight}))
    read = read_rank(tmp_path / "rank").steps[0].after["weight"]
    assert read.view(torch.int32).tolist() == weight.view(torch.int32).tolist()


def test_a_file_is_one_of_the_format_safetensors(whole):
    content, trace = whole
    (step,) = trace.steps
    read = safetensors.torch.load(content)
    assert torch.equal(read["0/before/weight"], step.before["weight"])
    assert torch.equal(read["0/after/bias"], step.after["bias"])


@pytest.mark.parametrize(
    ("entry", "size"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, 8),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, 8),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, 8),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, 4),
        ({"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}, 4),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, 4),
        ({"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}, 4),
    ],
)
def test_a_tensor_that_does_not_fill_its_place_is_refused(tmp_path, entry, size):
    header = json.dumps({"__metadata__": {"plumbline": "{}"}, "w": entry}).encode()
    (tmp_path / "hostile").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * size)
    with pytest.raises((LookupError, TypeError, ValueError, RuntimeError)):
        read_file(tmp_path / "hostile")


@pytest.mark.parametrize("header", [b"4", b"[]", b"null", b'"x"', b"{}", b'{"__metadata__": 4}'])
def test_a_header_that_is_no_table_is_refused(tmp_path, header):
    (tmp_path / "hostile").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(TraceError, match="not a complete trace"):
        read_rank(tmp_path / "hostile")


def test_a_view_is_written_as_what_it_shows(tmp_path):
    weight = torch.arange(12.0).view(3, 4).t()[::2]
    write_rank(str(tmp_path / "rank"), trace_of({"weight": weight}))
    assert torch.equal(read_rank(tmp_path / "rank").steps[0].after["weight"], weight)


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyError):
        write_rank(str(tmp_path / "rank"), trace_of({"weight": torch.ones(1, dtype=torch.complex64)}))
    assert not (tmp_path / "rank").exists()


def test_a_file_cut_off_anywhere_is_refused(whole, tmp_path):
    content, _ = whole
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(TraceError, match="not a complete trace"):
            read_rank(tmp_path / "cut")


def test_a_flipped_bit_anywhere_is_a_trace_or_refused(whole, tmp_path):
    content, _ = whole
    path = tmp_path / "flipped"
    refused = 0
    for index in range(len(content)):
        for bit in (0, 5, 7):
            changed = bytearray(content)
            changed[index] ^= 1 << bit
            path.write_bytes(bytes(changed))
            try:
                assert isinstance(read_rank(path), RankTrace)
            except TraceError:
                refused += 1
    assert refused


@SHARED_FOLDER
@given(st.binary(max_size=200))
def test_any_other_file_is_refused(tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(TraceError):
        read_rank(tmp_path / "other")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text("0/ab", max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["rank", "world_size", "error", "failed_at", "steps", "micro_batches", "continues", "scale",
                         "skipped", "learning_rates"]), inner, max_size=6),
    max_leaves=20,
)  # fmt: skip
STEP = st.fixed_dictionaries(
    {
        "micro_batches": JSON | st.just([]),
        "learning_rates": JSON | st.just([]),
        "skipped": JSON,
        "scale": JSON,
        "continues": st.booleans(),
    }
)
VALUES = JSON | st.fixed_dictionaries(
    {"rank": JSON, "world_size": JSON, "error": JSON, "failed_at": JSON, "steps": JSON | st.lists(STEP, max_size=2)}
)


def write_by_hand(path, values, name):
    tensor = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": {"plumbline": json.dumps(values)}, name: tensor}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


@SHARED_FOLDER
@given(VALUES, st.text("0123/ab", max_size=6) | st.sampled_from(["0/before/w", "1/after/w", "x/after/w"]))
def test_a_header_that_says_anything_is_a_trace_or_refused(tmp_path, values, name):
    write_by_hand(tmp_path / "hostile", values, name)
    with contextlib.suppress(TraceError):
        assert isinstance(read_rank(tmp_path / "hostile"), RankTrace)


def test_a_first_step_that_continues_another_is_refused(tmp_path):
    step = {"micro_batches": [], "learning_rates": [], "skipped": False, "scale": None, "continues": True}
    values = {"rank": 0, "world_size": 1, "error": None, "failed_at": None, "steps": [step]}
    write_by_hand(tmp_path / "hostile", values, "0/after/weight")
    with pytest.raises(TraceError):
        read_rank(tmp_path / "hostile")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TraceError, match="run the cell again"):
        read_rank(tmp_path / "nowhere")


def test_a_pickle_is_not_opened(tmp_path):
    (tmp_path / "opened").unlink(missing_ok=True)

    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    torch.save(Payload(), tmp_path / "pickle")
    with pytest.raises(TraceError):
        read_rank(tmp_path / "pickle")
    assert not (tmp_path / "opened").exists()


def test_reading_over_and_over_leaves_nothing_in_this_process(tmp_path):
    path = tmp_path / "rank-3.safetensors"
    write_rank(str(path), trace_of({f"layer.{number}": torch.ones(300, number + 1) for number in range(9)}))

    def read(times):
        for _ in range(times):
            read_rank(path)
        gc.collect()
        return sys.getallocatedblocks()

    read(5)
    before = read(50)
    assert read(50) - before < 50, "less than one object a time"
