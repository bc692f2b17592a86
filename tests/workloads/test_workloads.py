"""All training problems: the same weights and data everywhere, and a loss that can be trained on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plumbline.worker.assignment import Assignment
from plumbline.worker.job import Job
from plumbline.worker.recorder.recorder import Recorder
from plumbline.workloads import PERFORMANCE, WORKLOADS

EVERY = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
PLAIN = pytest.mark.parametrize(
    "workload",
    [WORKLOADS[name] for name in ("linear-exact", "mlp", "cnn-batchnorm", "contrastive", "lm-tokens")],
    ids=lambda workload: workload.name,
)


def weights(workload, dtype=torch.float32):
    return {name: value.clone() for name, value in workload.model(dtype).state_dict().items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@EVERY
def test_weights_are_the_same_whatever_the_global_generator(workload):
    torch.manual_seed(1)
    first = weights(workload)
    torch.manual_seed(2)
    torch.rand(7)
    assert equal(first, weights(workload))


@EVERY
def test_building_a_model_leaves_the_global_generator_alone(workload):
    before = torch.get_rng_state()
    workload.model()
    workload.dataset(2)
    workload.val_dataset(2)
    assert torch.equal(before, torch.get_rng_state())


@EVERY
def test_float64_weights_are_the_float32_ones(workload):
    double = weights(workload, torch.float64)
    assert equal(weights(workload), {k: v.float() if v.is_floating_point() else v for k, v in double.items()})


@EVERY
@pytest.mark.parametrize("devices", [1, 2, 3, 8, 96])
def test_data_is_the_same_at_every_call_and_every_sample_knows_its_place(workload, devices):
    first, second = workload.dataset(devices), workload.dataset(devices)
    assert equal(first.columns, second.columns)
    assert [int(first[index]["index"]) for index in range(len(first))] == list(range(len(first)))
    assert first.batch([3, 1])["index"].tolist() == [3, 1]


@EVERY
def test_float64_data_is_the_float32_data(workload):
    double = workload.dataset(2, torch.float64).columns
    assert all(column.dtype == torch.float64 for column in double.values() if column.is_floating_point())
    single = {k: v.float() if v.is_floating_point() else v for k, v in double.items()}
    assert equal(single, workload.dataset(2).columns)


@EVERY
def test_held_out_data_is_other_data(workload):
    train, held_out = workload.dataset(1).columns, workload.val_dataset(1).columns
    name = next(name for name in train if name != "index")
    count = min(len(train[name]), len(held_out[name]))
    assert not torch.equal(train[name][:count], held_out[name][:count])


@PLAIN
@given(st.integers(1, 200))
def test_every_device_gets_as_many_samples(workload, devices):
    size = workload.global_batch_size(devices)
    assert size % devices == 0
    assert workload.batch_size <= size < workload.batch_size + devices
    assert len(workload.dataset(devices)) == workload.steps_per_epoch * size


@PLAIN
def test_held_out_shards_are_unequal(workload):
    assert all(len(workload.val_dataset(devices)) % devices for devices in (2, 3, 4, 8))


@PLAIN
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16], ids=["32", "16", "bf16"])
def test_the_loss_is_a_number_that_every_parameter_moves(workload, autocast):
    model, batch = workload.model().train(), workload.dataset(2).batch(range(workload.global_batch_size(2)))
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = workload.loss(model(batch), batch)
    assert loss.shape == ()
    assert loss.isfinite()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert any(parameter.grad.norm() > 0 for parameter in model.parameters())


@PLAIN
def test_the_batch_is_the_outputs_first_dimension(workload):
    batch = workload.dataset(1).batch(range(5))
    assert len(workload.model()(batch)) == 5


@PLAIN
def test_an_epoch_is_more_than_one_step_and_training_more_than_one_epoch(workload):
    assert workload.epochs > 1
    assert workload.steps_per_epoch > 1


@PLAIN
@pytest.mark.parametrize("workers", [0, 1])
def test_default_collation_gives_the_batch(workload, workers):
    data = workload.dataset(1)
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=workers)
    assert equal(next(iter(loader)), data.batch(range(4)))


def test_shards_differ_in_their_number_of_tokens():
    workload = WORKLOADS["lm-tokens"]
    for devices in (2, 3, 4, 8):
        real = workload.dataset(devices).columns["real"]
        for step in real.split(workload.global_batch_size(devices)):
            assert len({int(share.sum()) for share in step.chunk(devices)}) > 1
        assert real.any(1).all(), "no sample is empty"


@pytest.mark.parametrize("name", ["lm-tokens", "accumulation-tokens"])
def test_the_loss_is_the_mean_over_what_the_labels_name(name):
    workload = WORKLOADS[name]
    batch = workload.dataset(1).batch(range(7))
    outputs = workload.model()(batch)
    flat = outputs.flatten(0, 1), batch["labels"].flatten()
    torch.testing.assert_close(workload.loss(outputs, batch), torch.nn.functional.cross_entropy(*flat))
    assert (batch["labels"] != -100).equal(batch["real"])


def trained(workload, devices, dtype, steps=6):
    """Train on one device, without shuffling; return weights, gradients and losses of every step."""
    data, size = workload.dataset(devices, dtype), workload.global_batch_size(devices)
    model = workload.model(dtype)
    optimizer = workload.optimizer(model.parameters())
    seen = []
    for step in range(steps):
        start = step * size % len(data)
        batch = data.batch(range(start, start + size))
        optimizer.zero_grad()
        loss = workload.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        seen += [t.detach().clone() for p in model.parameters() for t in (p, p.grad)]
    return seen


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16, 32, 64, 128])
def test_the_exact_problem_is_exact_in_float32(devices):
    workload = WORKLOADS["linear-exact"]
    exact, single = trained(workload, devices, torch.float64), trained(workload, devices, torch.float32)
    for right, found in zip(exact, single, strict=True):
        assert torch.equal(right.float().double(), right), "float32 holds every number"
        assert torch.equal(found.double(), right)


@pytest.mark.parametrize("devices", [2, 8, 128])
def test_the_exact_problem_is_exact_in_any_order_of_summation(devices):
    workload = WORKLOADS["linear-exact"]
    data, size = workload.dataset(devices), workload.global_batch_size(devices)
    model = workload.model()
    whole = torch.autograd.grad(
        workload.loss(model(data.batch(range(size))), data.batch(range(size))), model.parameters()
    )
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    shares = [data.batch(share) for share in order.chunk(devices)]
    mean = sum(workload.loss(model(share), share) for share in shares) / devices
    for left, right in zip(whole, torch.autograd.grad(mean, model.parameters()), strict=True):
        assert torch.equal(left, right)


@pytest.fixture
def job_of(cell_of):
    """Return one rank's job."""

    def job(cell, rank=0):
        devices = ("cpu",) * cell.parallelism.devices_per_process(cell.topology)
        return Job(Assignment(1, cell, rank, "gloo", devices, {}, "", ""), Recorder())

    return job


@pytest.mark.parametrize(
    ("workload", "steps"),
    [("mlp", 6), ("accumulation", 4), ("perf-mlp", PERFORMANCE["perf-mlp"].extent(1).steps_in_all)],
)
def test_a_job_says_how_many_steps_the_training_has(job_of, cell_of, workload, steps):
    """Two epochs of three batches, or of five batches in windows of three, the last of which is short."""
    assert job_of(cell_of(workload, "none", "1x1")).steps == steps


@PLAIN
@pytest.mark.parametrize(("backend", "topology"), [("none", "1x1"), ("dp", "1x3"), ("ddp", "2x2"), ("ddp2", "2x2")])
def test_loaders_of_all_processes_draw_the_global_batch(job_of, cell_of, workload, backend, topology):
    cell = cell_of(workload.name, backend, topology)
    jobs = [job_of(cell, rank) for rank in range(cell.processes)]
    assert sum(job.batch_size for job in jobs) == jobs[0].global_batch_size
    assert sum(len(job.devices) for job in jobs) == cell.topology.devices
    assert [job.rank for job in jobs] == [job.node_rank * cell.processes // cell.topology.num_nodes + job.local_rank
                                          for job in jobs]  # fmt: skip


@pytest.mark.parametrize(("precision", "dtype"), [("64", torch.float64), ("32", torch.float32), ("16", torch.float32)])
def test_the_precision_is_that_of_weights_and_data(job_of, cell_of, precision, dtype):
    job = job_of(cell_of("mlp", "none", "1x1", precision))
    assert {p.dtype for p in job.model().parameters()} == {job.dataset[0]["x"].dtype} == {dtype}


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("64", torch.float32), ("32", torch.float32), ("16", torch.float16), ("bf16", torch.bfloat16)],
)
def test_autocast_and_scaler_are_those_of_the_precision(job_of, cell_of, precision, dtype):
    job = job_of(cell_of("mlp", "none", "1x1", precision))
    with job.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert job.grad_scaler().is_enabled() == (precision == "16")
