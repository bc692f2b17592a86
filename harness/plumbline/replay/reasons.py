"""Messages to the user: why a call cannot be replayed, or a parameter's exact gradient is unknown."""

from __future__ import annotations

COMMUNICATES = "its forward communicates with other ranks"

NOT_REPEATABLE = "its forward returned a different result when it was run again with the same inputs"

COMPILED_DRAWS = (
    "its compiled code draws random numbers that check cannot repeat; set "
    "torch._inductor.config.fallback_random = True, so that it draws the same numbers as without the compiler"
)

OUTSIDE = "used outside of any recorded call, or by a loss that a module stores but does not return"

FLAT_PARTS = "FSDP1 shards DTensors, or shards a model over some of the ranks only"
STALE = "FSDP1 computed its forward with weights from before the optimizer's last step"

SECOND_ORDER = "second-order gradients were computed through it (create_graph=True)"
