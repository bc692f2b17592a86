"""The lane's stages, most important first. Their limits add up to less than 40 minutes."""

from __future__ import annotations

from pathlib import Path

from accelerator_lane.stage import Stage

ROOT = Path(__file__).resolve().parents[2]

TOTAL_S = 2400.0
"""The default time for all stages together, in seconds."""

RANKS_ON_ONE_DEVICE = 8

CONFORMANCE, PERFORMANCE = "suites/conformance", "suites/performance"

CELL_LIMIT = ("--time-limit", "60")
"""Seconds for one cell, so that a few hanging cells do not use up a stage's time."""

LIMITS_S = {
    "doctor": (60, 60),
    "smoke": (120, 120),
    "cuda-tests": (300, 300),
    "main-job": (300, 600),
    "oversubscribe": (480, 360),
    "performance": (480, 480),
    "claims": (60, 60),
    "oversubscribe-16": (300, 120),
    "subjects": (300, 300),
}
"""Seconds by stage: on one device, which has few cells of its own, and on several."""

LIBRARIES = {
    "lightning": ("lightning", "fabric"),
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
    "ignite": ("ignite",),
}
"""Subjects by the module that they need."""


def _cuda_tests() -> list[str]:
    """Return the test files for CUDA; others may import modules of the development environment."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(one.relative_to(ROOT)) for one in files if "mark.cuda" in one.read_text(encoding="utf-8"))


def stages(gpus: int, modules: frozenset[str] = frozenset(), accelerator: str = "cuda") -> list[Stage]:
    """Return the stages for a machine with ``gpus`` devices of a type and these modules installed."""
    kind = ("--accelerator", accelerator)
    here = ("--gpus", str(gpus), *kind)
    shared = ("--gpus", str(RANKS_ON_ONE_DEVICE), *kind, "--oversubscribe")
    judged = ("pytest", CONFORMANCE, *CELL_LIMIT)
    own = ("--subject", "reference", "--subject", "torch")
    released = [name for module, names in LIBRARIES.items() if module in modules for name in names]
    others = [word for name in ("torch", "train-loop", *released) for word in ("--subject", name)]
    ranks = f"{RANKS_ON_ONE_DEVICE} ranks that share the devices"

    def stage(name: str, why: str, command: tuple[str, ...]) -> Stage:
        suite = command[:2] in (("pytest", CONFORMANCE), ("pytest", PERFORMANCE))
        return Stage(name, why, command, LIMITS_S[name][gpus > 1], suite=suite)

    found = [
        stage("doctor", "is the machine ready for a run", ("plumbline", "doctor")),
        stage(
            "smoke",
            "a small cell of each backend: do ranks start, record and end",
            (*judged, "-m", "smoke", *(here if gpus > 1 else shared), *own),
        ),
        stage(
            "cuda-tests",
            "the project's own tests that are skipped without a CUDA device",
            ("pytest", *_cuda_tests(), "-m", "cuda", "-ra", "-p", "no:cacheprovider", "-n", "4", "--disable-warnings"),
        ),
        stage("main-job", "README's main job on this machine's devices", (*judged, *here)),
        stage("oversubscribe", f"{ranks}, in float32", (*judged, *shared, "--precisions", "32", *own)),
        stage(
            "performance",
            "speed and memory in 32, 16 and bf16",
            ("pytest", PERFORMANCE, *here, "--precisions", "32,16,bf16", *own),
        ),
        stage(
            "claims",
            "the documentation's claims about memory and speed, from the stage performance",
            ("python", "ci/accelerator_lane/claims.py", "{folder}/../performance"),
        ),
        stage(
            "oversubscribe-16",
            f"{ranks}, in the other precisions",
            (*judged, *shared, "--precisions", "16,bf16,64"),
        ),
        stage(
            "subjects",
            "other trainers on this machine's devices, in float32 and float16",
            (*judged, *here, "--precisions", "32,16", *others),
        ),
    ]
    assert sum(one.limit_s for one in found) <= TOTAL_S
    # Those tests and claims are about CUDA.
    return [one for one in found if accelerator == "cuda" or one.name not in ("cuda-tests", "claims")]
