"""Workloads of the user's own: loaded from a file or a module, checked before anything is trained, found by a cell.

Whatever a trainer must not be accused of, because the problem itself is wrong, belongs here; verdicts do not. Every
process loads them by itself: the one that plans and judges, a fork server, and a process that a subject has started.
"""

from __future__ import annotations
