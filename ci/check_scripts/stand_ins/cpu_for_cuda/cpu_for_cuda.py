"""Redirects Megatron's calls of ``torch.cuda`` to the CPU: devices, streams, and generator states."""

import functools

import torch


def _on_cpu(inner):
    @functools.wraps(inner)
    def made(*arguments, **options):
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return inner(*arguments, **options)

    return made


class _Stream:
    """A stream, an event or a context that does nothing, because the CPU has no streams."""

    def __init__(self, *arguments, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __getattr__(self, name):
        return lambda *arguments, **options: None


for _name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
    setattr(torch, _name, _on_cpu(getattr(torch, _name)))
torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *arguments, **options: self
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda device=None: None
torch.cuda.current_stream = torch.cuda.Stream = torch.cuda.stream = torch.cuda.Event = _Stream
torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda device="cpu": torch.get_rng_state()
torch.cuda.manual_seed = torch.manual_seed

_type = torch.Tensor.type


def _named_cuda(self, *arguments, **options):
    """Megatron's distributed optimizer recognises the parameters that it may shard by the name of their type."""
    named = _type(self, *arguments, **options)
    return named.replace("torch.", "torch.cuda.") if isinstance(named, str) else named


torch.Tensor.type = _named_cuda

import megatron.core.tensor_parallel.random as _random  # noqa: E402

_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
