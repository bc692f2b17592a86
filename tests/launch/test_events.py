"""A fork server's messages are interpreted correctly or rejected: any process may have found the descriptor."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbline.launch.launch_progress import Children, NoEventError, event_of

EXIT = {
    "event": "exit",
    "launch": 1,
    "rank": 0,
    "code": -9,
    "steps": 2,
    "evidence": False,
    "out_of_memory": False,
    "at": 5.0,
}


def test_an_event_is_returned_as_it_is():
    assert event_of(json.dumps(EXIT).encode()) == EXIT


@pytest.mark.parametrize("name", EXIT)
def test_an_event_without_one_of_its_fields_is_none(name):
    with pytest.raises(NoEventError, match=name if name != "event" else "not an event"):
        event_of(json.dumps({**EXIT, name: [1]}).encode())
    with pytest.raises(NoEventError, match=name if name != "event" else "not an event"):
        event_of(json.dumps({key: value for key, value in EXIT.items() if key != name}).encode())


def test_an_event_about_the_end_of_a_child_has_all_that_is_kept_of_it():
    """Otherwise, an event without some field ends the run instead of being rejected."""
    child = {"pid": 7, "as": 1, "trace": None, "steps": 2, "failed": False, "idle": False, "killed": False}
    child |= {"orphaned": False, "out_of_memory": True, "unwritten": None}
    gone = {"event": "gone", "launch": 1, "rank": 0, "at": 1.0, **child}
    Children(2).update(event_of(json.dumps(gone).encode()), late=False)
    for name in child:
        with pytest.raises(NoEventError, match=name):
            event_of(json.dumps({key: value for key, value in gone.items() if key != name}).encode())


@pytest.mark.parametrize("line", [b"", b"null", b"[]", b"{}", b'"exit"', b"[" * 100_000, b"\xff", b'{"event": [1]}'])
def test_what_is_no_event_is_refused(line):
    with pytest.raises(NoEventError):
        event_of(line)


@pytest.mark.parametrize("at", ["NaN", "1e999", "-Infinity", "9" * 400])
def test_an_event_happens_at_some_time(at):
    with pytest.raises(NoEventError, match="at"):
        event_of(json.dumps(EXIT).replace("5.0", at).encode())


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner), max_leaves=5))
def test_whatever_stands_in_a_field_is_an_event_or_refused(value):
    for name in EXIT:
        try:
            event = event_of(json.dumps({**EXIT, name: value}).encode())
        except NoEventError:
            continue
        assert event["event"] == "exit"
        assert isinstance(event["rank"], int)
