"""A Python function on N warm ranks: forked from this process, joined in a process group, watched and ended.

``run_on_ranks`` is all that other packages use: the pytest marker is built on it, and so can be whatever else has to
run a user's function on several ranks. Nothing here judges, and nothing here knows pytest.
"""

from __future__ import annotations

from plumbline.ranks.rank_end import How, RankEnd, UnpicklableError
from plumbline.ranks.run import run_on_ranks

__all__ = ["How", "RankEnd", "UnpicklableError", "run_on_ranks"]
