"""A dispatch mode that is told of operators and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.recording.sharding import dtensors


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``before`` with each operator and its arguments, also inside operators on DTensors."""

    supports_higher_order_operators = True

    def __init__(self, before: Callable[[Any, list[Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, dtensors().DTensor) for one in types):
            return NotImplemented
        self._before(func, [*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))
