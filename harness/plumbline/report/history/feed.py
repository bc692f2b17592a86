"""An Atom feed (RFC 4287) of what changed. Its addresses are relative to where the feed lies."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import NAMESPACE_URL, uuid5
from xml.etree import ElementTree

from plumbline.report.history.changes import Step
from plumbline.report.text import counted, listed, printable, printable_lines

NAMESPACE: Final = "http://www.w3.org/2005/Atom"
MOST_ENTRIES: Final = 100
MOST_NAMES: Final = 10


def feed(steps: Sequence[Step], updated: datetime, page: str, own: str) -> str:
    """Return the newest changes; ``page`` and ``own`` are the addresses of the page and of the feed itself.

    An entry has the same id whenever the site is made again from the same runs.
    """
    ElementTree.register_namespace("", NAMESPACE)
    root = _element(None, "feed")
    _text(root, "title", "Plumbline: what changed")
    _text(root, "id", _id("feed"))
    _text(root, "updated", updated.isoformat())
    _text(_element(root, "author"), "name", "Plumbline")
    _element(root, "link", rel="self", href=own)
    _element(root, "link", rel="alternate", href=page)
    every = [(step, change) for step in steps for change in step.changes]
    for step, change in every[:MOST_ENTRIES]:
        (name, address), *others = change.places
        entry = _element(root, "entry")
        where = counted(1 + len(others), "cell") if others else name
        _text(entry, "title", printable(f"{next(iter(step.reasons), step.subject)}: {where}: {change.sentence}"))
        _text(entry, "id", _id(step.subject, change.sentence, name, step.run.header.run_id))
        _text(entry, "updated", step.run.header.started.isoformat())
        _element(entry, "link", rel="alternate", href=f"{page}#{address}")
        _element(entry, "category", term=change.kind)
        names = listed((name for name, _ in change.places), MOST_NAMES)
        told = filter(None, [step.subject, *step.reasons, names, change.message, change.reproduce])
        _text(entry, "summary", printable_lines("\n".join(told)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _id(*words: str) -> str:
    return uuid5(NAMESPACE_URL, f"plumbline:{':'.join(words)}").urn


def _element(parent: ElementTree.Element | None, name: str, **attributes: str) -> ElementTree.Element:
    tag = f"{{{NAMESPACE}}}{name}"
    return ElementTree.Element(tag, attributes) if parent is None else ElementTree.SubElement(parent, tag, attributes)


def _text(parent: ElementTree.Element, name: str, text: str) -> None:
    _element(parent, name).text = text
