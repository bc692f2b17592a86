"""Why a call cannot be replayed, or a parameter's exact gradient is not known, in words for the user."""

from __future__ import annotations

COMMUNICATES = "its forward communicates with other ranks"

NOT_REPEATABLE = "its forward gave another result when it was run again with the same inputs"

COMPILED_DRAWS = (
    "it is compiled, and this compiled code draws random numbers in a way that check cannot repeat; set "
    "torch._inductor.config.fallback_random = True to make it draw as without the compiler"
)

OUTSIDE = "it is used outside of any recorded call, or by a loss that a module holds and does not return"
STALE = "FSDP1 computed its forward with weights from before the optimizer's last step"
