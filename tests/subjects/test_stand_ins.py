"""A library can be imported without packages that its training never uses, and nothing else is affected."""

from __future__ import annotations

import sys

import pytest

from plumbline.subjects.released import stand_ins

SOURCE = """
import a_painter.brushes as brushes
from a_painter import Canvas
from a_cloud.storage import Client
import json

brushes.style("broad")

class Picture(Canvas):
    pass
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "a_library.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("a_library", "a_painter"):
        sys.modules.pop(name, None)


def test_what_is_missing_is_stood_in_for_and_gone_afterwards(library):
    before = list(sys.meta_path)
    with stand_ins({"a_painter": "a_painter", "a_cloud": "a_cloud.storage", "json": "json"}):
        import a_library
    import json

    assert issubclass(a_library.Picture, a_library.Canvas)
    assert a_library.json is json
    assert sys.meta_path == before
    assert not [name for name in sys.modules if name.startswith(("a_painter", "a_cloud"))]


def test_what_is_installed_is_used(library):
    (library / "a_painter.py").write_text("style = None\n")
    with pytest.raises(ModuleNotFoundError, match="brushes"), stand_ins({"a_painter": "a_painter"}):
        import a_library  # noqa: F401


def test_what_nobody_named_is_missing_still(library):
    with pytest.raises(ModuleNotFoundError, match="a_cloud"), stand_ins({"a_painter": "a_painter"}):
        import a_library  # noqa: F401
