"""A subject with a warm pool, for commands that train and judge their own cells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import torch

from plumbline.launch.pool import Pool
from plumbline.planning.declaration import Declaration
from plumbline.subjects.load import parse_subject


@contextmanager
def open_subject(subject: str) -> Iterator[tuple[Pool, list[Declaration]]]:
    """Yield the pool of a subject and its declarations. The pool is closed afterwards.

    Raises:
        SubjectError: there is no such subject.
    """
    torch.set_num_threads(1)  # as in the pytest plugin
    locator, python = parse_subject(subject)
    with closing(Pool(locator, python)) as pool:
        yield pool, [Declaration.of(locator, values) for values in pool.subjects]
