"""A dispatch mode that tells others of operators and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from plumbline.recording.sharding import dtensors


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``before`` with each operator and its arguments, and ``after`` also with its results.

    This includes the operators inside operators on DTensors.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        before: Callable[[Any, list[Any]], None] | None = None,
        after: Callable[[Any, list[Any], Any], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before, self._after = before, after

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, dtensors().DTensor) for one in types):
            return NotImplemented
        arguments = [*args, *(kwargs or {}).values()]
        if self._before is not None:
            self._before(func, arguments)
        outputs = func(*args, **(kwargs or {}))
        if self._after is not None:
            self._after(func, arguments, outputs)
        return outputs
