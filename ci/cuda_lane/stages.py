"""What the lane runs, in the order of what matters most. The limits add up to less than 40 minutes."""

from __future__ import annotations

from cuda_lane.stage import Stage

TOTAL_S = 2400.0
"""Seconds for all stages together, unless another budget is asked for."""

RANKS_ON_ONE_DEVICE = 8

CONFORMANCE, PERFORMANCE = "suites/conformance", "suites/performance"

LIBRARIES = {
    "lightning": ("lightning", "fabric"),
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
    "ignite": ("ignite",),
}
"""Subjects by the module that they need."""


def stages(gpus: int, modules: frozenset[str] = frozenset()) -> list[Stage]:
    """Return the stages for a machine with so many CUDA devices, and with these modules installed."""
    cuda = ("--accelerator", "cuda")
    here = ("--gpus", str(gpus), *cuda)
    shared = ("--gpus", str(RANKS_ON_ONE_DEVICE), *cuda, "--oversubscribe")
    own = ("--subject", "reference", "--subject", "torch")
    released = [name for module, names in LIBRARIES.items() if module in modules for name in names]
    found = [
        Stage("doctor", "is the machine fit for a run", ("plumbline", "doctor"), 60),
        Stage(
            "smoke",
            "one small cell of each backend: do ranks start, record and end",
            ("pytest", CONFORMANCE, "-m", "smoke", *(here if gpus > 1 else shared), *own),
            120,
            suite=True,
        ),
        Stage(
            "cuda-tests",
            "the project's own tests that are skipped where there is no CUDA device",
            ("pytest", "tests", "-m", "cuda", "-ra", "-p", "no:cacheprovider"),
            240,
        ),
        Stage(
            "main-job",
            "README's main job on the devices that are here",
            ("pytest", CONFORMANCE, *here),
            480,
            suite=True,
        ),
        Stage(
            "oversubscribe",
            f"{RANKS_ON_ONE_DEVICE} ranks on the devices that are here, over gloo, in float32",
            ("pytest", CONFORMANCE, *shared, "--precisions", "32", *own),
            420,
            suite=True,
        ),
        Stage(
            "performance",
            "speed and memory in 32, 16 and bf16",
            ("pytest", PERFORMANCE, *here, "--precisions", "32,16,bf16", *own),
            480,
            suite=True,
        ),
        Stage(
            "claims",
            "the documentation's claims on memory and speed, from the run of the stage performance",
            ("python", "ci/cuda_lane/claims.py", "{folder}/../performance"),
            60,
        ),
        Stage(
            "oversubscribe-16",
            f"{RANKS_ON_ONE_DEVICE} ranks on the devices that are here, over gloo, in the other precisions",
            ("pytest", CONFORMANCE, *shared, "--precisions", "16,bf16,64"),
            240,
            suite=True,
        ),
        Stage(
            "subjects",
            "other trainers on the devices that are here, in float32 and float16",
            (
                *("pytest", CONFORMANCE, *here, "--precisions", "32,16", "--subject", "torch"),
                *(word for name in ("train-loop", *released) for word in ("--subject", name)),
            ),
            300,
            suite=True,
        ),
    ]
    assert sum(stage.limit_s for stage in found) <= TOTAL_S
    return found
