"""A new launcher needs one class and one line of ``LAUNCHERS``."""

from __future__ import annotations

from contextlib import closing

from plumbline.core.outcome import Outcome, worst
from plumbline.engine.examine import examine
from plumbline.launch.cell_launch import Settings
from plumbline.launch.launchers import LAUNCHERS, find_launcher
from plumbline.launch.pool import Launcher, Pool


class Marked(Launcher):
    """Launches on this machine, and counts its pools."""

    pools = 0

    def pool(self, locator, python):
        self.pools += 1
        return Pool(locator, python)


def test_its_pools_train_and_are_judged(outside, cell_of, monkeypatch, tmp_path):
    monkeypatch.setitem(LAUNCHERS, "marked", Marked)
    launcher = find_launcher("marked")
    with closing(launcher.pool(str(outside("subject")), None)) as pool:
        examined = examine(pool, cell_of("mlp", "ddp", "1x2", subject="by-hand"), tmp_path, Settings(60))
    assert worst(finding.outcome for finding in examined.findings) is Outcome.PASSED, examined.findings
    assert launcher.pools == 1
