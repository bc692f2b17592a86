"""A subject, given as for ``--subject``, with a warm pool: for a session that trains and judges cells of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from plumbline.launch.pool import Pool
from plumbline.planning.declaration import Declaration
from plumbline.subjects.locator import parse_subject


@contextmanager
def open_subject(subject: str) -> Iterator[tuple[Pool, list[Declaration]]]:
    """Yield the pool of a subject, and all that it declares. The pool is closed afterwards.

    Raises:
        SubjectError: there is no such subject.
    """
    torch.set_num_threads(1)  # as the session that judges for pytest
    locator, python = parse_subject(subject)
    with closing(Pool(locator, python)) as pool:
        yield pool, [Declaration.of(locator, values) for values in pool.subjects]
