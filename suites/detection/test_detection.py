"""Does the judge notice? Known-bad trainers must be caught and explained, known-good ones left alone.

    pytest suites/detection
    pytest suites/detection -k averaging

One test is one trainer on one cell, with real ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.finding import UNEXPLAINED, diagnosis
from harness.core.outcome import worst
from harness.engine.examine import examine
from harness.launch.pool import Pool
from harness.launch.settings import Settings
from harness.subjects.load import load

EVERYBODY = Path(__file__).parent / "everybody.py"


def trials():
    """Return every trainer with each of its cells, as parameters."""
    found = load(str(EVERYBODY))
    import expect  # what lies beside everybody.py can be imported once that is loaded

    for trainer in found:
        expectation, file = trainer.train.expectation, trainer.train.expectation_file
        marks = [pytest.mark.xfail(strict=True, reason=expectation.unseen)] if expectation.unseen else []
        for cell in expectation.cells:
            values = (expectation, file, expect.cell_of(cell, trainer.name))
            yield pytest.param(*values, id=f"{file}-{trainer.name}-{cell.replace('/', '-')}", marks=marks)


@pytest.fixture(scope="session")
def pool():
    """One fork server for all trainers."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    opened = Pool(str(EVERYBODY))
    yield opened
    opened.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("expectation", "file", "cell"), list(trials()))
def test_detection(expectation, file, cell, pool, tmp_path, record_property, pytestconfig):
    settings = Settings(time_limit=60, sketch_above=pytestconfig.getoption("sketch_above"))
    findings = examine(pool, cell, tmp_path / "evidence", settings).findings
    outcome, told = worst(finding.outcome for finding in findings), diagnosis(findings)
    bad = [finding for finding in findings if finding.outcome.is_bad]
    explained = told is not None and told.cause not in (None, UNEXPLAINED)
    named = explained and told.family in expectation.families
    steps = [finding.step + 1 for finding in bad if finding.step is not None]
    record_property(
        "detection",
        {
            "family": file,
            "trainer": cell.subject,
            "cell": cell.id,
            "caught": outcome.is_bad,
            "named": named,
            "unseen": expectation.unseen is not None,
            "steps": min(steps, default=None),
            "precision": cell.precision,
            "error": max(
                (f.error_x_noise / f.limit_x_noise for f in bad or findings if f.error_x_noise and f.limit_x_noise),
                default=None,
            ),
        },
    )
    said = "\n".join(f"{f.check}: {f.outcome.value} ({f.family}, {f.cause}): {f.message}" for f in bad or findings)
    if not expectation.families:
        assert outcome in expectation.outcomes, said
        return
    assert outcome.is_bad, f"it escapes\n{said}"
    assert named, f"it is called {told.family}, {told.cause}, not one of {expectation.families}\n{said}"
