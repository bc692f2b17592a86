"""A type of device of our own, ``own``: torch's PrivateUse1 in Python. Its memory and kernels are those of the CPU.

``load`` is an entry point of the group ``torch.backends``, so ``import torch`` registers the type, as it does for
devices that an extension of torch brings. torch's guard of Python devices has one device, which ranks share.

A tensor is an empty one of this type. A table has its numbers, by its storage: autograd makes shallow copies of tensors
that share it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME, BACKEND = "own", "ownccl"
TOTAL_BYTES = 1 << 30

_DATA: dict[int, torch.Tensor] = {}
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_COPIES = (torch.ops.aten._copy_from.default, torch.ops.aten._copy_from_and_resize.default)
_libraries = []


class OwnModule:
    """``torch.own``."""

    def __init__(self):
        self.started = False
        self.generator = torch.Generator()
        self.allocated = self.peak = 0

    def is_available(self):
        return True

    def is_initialized(self):
        return self.started

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def set_device(self, device):
        self.started = True

    def get_device_name(self, device=None):
        return "Own Device 1"

    def synchronize(self, device=None):
        self.started = True

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed):
        self.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device=NAME):
        return self.generator.get_state()

    def set_rng_state(self, state, device=NAME):
        self.generator.set_state(state)

    def memory_stats(self, device=None):
        return {"allocated_bytes.all.peak": self.peak, "reserved_bytes.all.peak": self.peak}

    def memory_allocated(self, device=None):
        return self.allocated

    memory_reserved = memory_allocated

    def mem_get_info(self, device=None):
        return TOTAL_BYTES - self.allocated, TOTAL_BYTES


module = OwnModule()


def is_own(value):
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def wrap(data):
    """Return a tensor on the device that shares these numbers."""
    module.started = True
    tensor = torch._C._acc.create_empty_tensor(data.shape, data.dtype)
    key = tensor.untyped_storage()._cdata
    if key in _DATA:  # the address of a freed storage
        module.allocated -= _DATA[key].nbytes
    _DATA[key] = data
    module.allocated += data.nbytes
    module.peak = max(module.peak, module.allocated)
    if not data.is_contiguous():
        tensor = torch.ops.aten._reshape_alias.default.redispatch(_META, tensor, data.shape, data.stride())
    return tensor


def unwrap(value):
    """Return a tensor's numbers on the CPU; return other values unchanged."""
    if is_own(value):
        data = _DATA[value.untyped_storage()._cdata]
        if (data.shape, data.stride(), data.dtype) == (value.shape, value.stride(), value.dtype):
            return data
        # torch has made a view of the empty storage; make the same view of the numbers' storage.
        begin = data.storage_offset() * data.itemsize // value.itemsize + value.storage_offset()
        view = torch.empty(0, dtype=value.dtype)
        return view.set_(data.untyped_storage(), begin, value.shape, value.stride())
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _kernel(op, *args, **kwargs):
    """Run an operator on the CPU; tensors that it changes in place keep their identity."""
    if op in _COPIES:
        unwrap(args[1]).copy_(unwrap(args[0]))
        return args[1]
    given = {}

    def on_cpu(value):
        number = unwrap(value)
        if is_own(value):
            given[id(number)] = (value, number)  # keep the number, so that its id is not reused
        return number

    inputs, options = tree_map(on_cpu, (args, kwargs))
    numbered = zip(inputs, op._schema.arguments, strict=False)
    with _Drawing(op):
        result = op(*(_as_tensor(value, one) for value, one in numbered), **options)

    def on_device(value):
        if id(value) not in given:
            return wrap(value) if isinstance(value, torch.Tensor) else value
        written, _ = given[id(value)]
        if written.shape != value.shape:  # the operator has resized its output
            written.data = wrap(value)
        return written

    return tree_map(on_device, result)


def _as_tensor(value, argument):
    """Return a number as a tensor if the operator does not accept numbers: torch passes wrapped numbers as such."""
    is_number = isinstance(value, (bool, int, float)) and str(argument.type) == "Tensor"
    return torch.tensor(value) if is_number else value


class _Drawing:
    """Makes an operator that draws random numbers use the device's generator."""

    def __init__(self, op):
        self.draws = torch.Tag.nondeterministic_seeded in op.tags

    def __enter__(self):
        if self.draws:
            self.before = torch.get_rng_state()
            torch.set_rng_state(module.generator.get_state())

    def __exit__(self, *error):
        if self.draws:
            module.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(self.before)


class OwnGroup(dist.ProcessGroup):
    """gloo over the tensors' numbers."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):  # noqa: N802
        return BACKEND

    def _call(self, name, *args):
        return getattr(self.gloo, name)(*tree_map(unwrap, args))

    def allreduce(self, *args):
        return self._call("allreduce", *args)

    def allreduce_coalesced(self, *args):
        return self._call("allreduce_coalesced", *args)

    def broadcast(self, *args):
        return self._call("broadcast", *args)

    def allgather(self, *args):
        return self._call("allgather", *args)

    def barrier(self, *args):
        return self.gloo.barrier()


_deepcopy = torch.Tensor.__deepcopy__


def _copied(tensor, memo):
    """Clone a tensor of the device, whose storage is empty."""
    if is_own(tensor) and id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return _deepcopy(tensor, memo)


def load():
    """Register the type, its kernels and its communication backend."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    every = torch.library.Library("_", "IMPL")
    every.fallback(_kernel, "PrivateUse1")
    _libraries.append(every)
    torch.Tensor.__deepcopy__ = _copied
    # Otherwise, Module.to replaces parameters one by one, and unties tied weights.
    torch.__future__.set_swap_module_params_on_conversion(True)
    dist.Backend.register_backend(BACKEND, OwnGroup, devices=[NAME])
