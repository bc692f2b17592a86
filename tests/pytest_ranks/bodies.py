"""Marked tests whose outcomes ``test_marker.py`` checks: half of them fail on purpose."""

import logging
import os
import signal
import subprocess
import sys
import time
import unittest
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MODULE = torch.nn.Linear(2, 2)


class TwoArgumentsError(Exception):
    """Cannot be pickled: it takes two arguments, and keeps one."""

    def __init__(self, first, second):
        super().__init__(first)


@pytest.fixture
def offset(rank):
    """Set up on each rank, with a process group."""
    yield dist.get_rank() * 10
    dist.barrier()
    print(f"teardown of rank {rank}")


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Set up once, in pytest's process."""
    file = tmp_path_factory.getbasetemp() / "set-up"
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    return file


@pytest.mark.ranks(2)
def test_world(rank, world_size):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, world_size, "gloo")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names[:3]] == [str(rank), str(rank), "2"]
    assert all(os.environ[name] for name in names[3:])


@pytest.mark.ranks(3)
def test_asynchronous_collectives(rank):
    one, other = torch.full((3,), float(rank)), torch.full((2,), float(rank))
    works = [dist.all_reduce(one, async_op=True), dist.broadcast(other, 2, async_op=True)]
    for work in works:
        work.wait()
    assert (one.tolist(), other.tolist()) == ([3.0] * 3, [2.0] * 2)


@pytest.mark.ranks(2)
def test_assert(rank):
    value = rank + 5
    assert value == 5, f"said on rank {rank}"


@pytest.mark.ranks(4)
def test_same_place():
    raise ValueError("everywhere")


@pytest.mark.ranks(4)
def test_two_places(rank):
    if rank == 2:
        raise KeyError("elsewhere")
    raise ValueError("mostly")


@pytest.mark.ranks(3)
def test_one_raises_others_wait(rank):
    if rank == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(3, timeout=4)
def test_hang(rank):
    if rank == 1:
        time.sleep(1000)
    dist.barrier()


@pytest.mark.ranks(3)
def test_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.ranks(2)
def test_exit_code(rank):
    if rank == 1:
        os._exit(7)


@pytest.mark.ranks(2)
def test_output(rank):
    print("printed by", rank)
    print("complained by", rank, file=sys.stderr)
    os.system(f"echo child of {rank}")
    logging.getLogger("mine").warning("logged by %d", rank)
    raise AssertionError


@pytest.mark.ranks(2)
def test_warning(rank):
    warnings.warn("once only", UserWarning, stacklevel=1)


@pytest.mark.ranks(2)
def test_skip_on_one_rank(rank):
    if rank == 1:
        pytest.skip("not on this one")
    dist.barrier()


@pytest.mark.ranks(2)
def test_subtests_fail(subtests):
    for number in range(3):
        with subtests.test("times two", number=number):
            assert number * 2 < 3


@pytest.mark.ranks(2)
def test_subtests_skip(subtests):
    for number in range(3):
        with subtests.test(number=number):
            pytest.skip("not this one")
    dist.barrier()


@pytest.mark.ranks(2)
def test_importorskip():
    pytest.importorskip("no_such_module")


@pytest.mark.ranks(2)
def test_xfail_inside():
    pytest.xfail("known")


@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_xfail_mark_with_type(rank):
    if rank == 0:
        raise ValueError
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=KeyError)
def test_xfail_mark_with_another_type():
    raise ValueError("not that one")


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_xpass():
    pass


@pytest.mark.ranks(2)
def test_raises(rank):
    with pytest.raises(ValueError, match="this"):
        raise ValueError("this")
    with pytest.warns(UserWarning, match="expected"):
        warnings.warn("expected", stacklevel=1)


@pytest.mark.ranks(2)
def test_fail_without_traceback():
    pytest.fail("in words", pytrace=False)


@pytest.mark.ranks(2)
def test_cannot_be_pickled():
    raise TwoArgumentsError("its message", "lost")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [3, "text", torch.ones(2), torch.sum, MODULE, lambda: 4], ids=str)
def test_parameters(value, rank, request):
    assert value is request.node.callspec.params["value"]


@pytest.mark.parametrize("expected", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2, 5)])
def test_sizes(expected, world_size):
    assert dist.get_world_size() == world_size == expected


@pytest.mark.ranks(2)
class TestClass:
    @pytest.fixture(autouse=True)
    def _prepared(self):
        self.value = 3

    def test_method(self, rank):
        total = torch.tensor(self.value)
        dist.all_reduce(total)
        assert total == 6

    @pytest.mark.ranks(3)
    def test_closest_marker(self, world_size):
        assert dist.get_world_size() == world_size == 3


@pytest.mark.ranks(2)
def test_fixture_of_a_rank(offset, rank):
    assert offset == 10 * rank
    raise AssertionError("to see the teardown")


@pytest.mark.ranks(2)
def test_same_folder(tmp_path, rank, world_size, monkeypatch, once):
    monkeypatch.setenv("OF_A_RANK", str(rank))
    (tmp_path / f"{rank}").write_text("here")
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size
    assert once.read_text() == "x"


def test_once_only(once):
    assert once.read_text() == "x"
    assert "OF_A_RANK" not in os.environ
    assert not dist.is_initialized()


@pytest.mark.ranks(2)
def test_captured(capsys, capfd_or_none, rank):
    print("of", rank)
    assert capsys.readouterr().out == f"of {rank}\n"


@pytest.fixture
def capfd_or_none():
    return None


@pytest.mark.ranks(2)
def test_captured_descriptors(capfd, rank):
    os.system(f"echo {rank}")
    assert capfd.readouterr().out == f"{rank}\n"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range(4))
def test_ddp_outlives_its_group(number):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_groups_come_and_go(rank):
    for _ in range(3):
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2


@pytest.mark.ranks(2, init=False)
def test_own_group():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()


@pytest.mark.ranks(2)
def test_leaves_processes(rank):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)  # of a body"])
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)  # of a body"], start_new_session=True)
    loader = torch.utils.data.DataLoader(range(8), num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 8


def test_multiplies_in_threads():
    """Torch's threads do not exist after a fork."""
    torch.set_num_threads(2)
    weights = torch.randn(600, 600, requires_grad=True)
    (weights @ weights).sum().backward()


@pytest.mark.ranks(2)
def test_multiplies_after_that():
    weights = torch.randn(600, 600, requires_grad=True)
    (weights @ weights).exp().sum().backward()
    assert weights.grad is not None


def test_without_marker(rank):
    pass


@pytest.mark.ranks("two")
def test_wrong_number():
    pass


@pytest.mark.ranks(2, time=3)
def test_wrong_name():
    pass


class TestUnittest(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_it(self):
        pass
