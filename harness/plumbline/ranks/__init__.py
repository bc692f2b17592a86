"""Runs a Python function on several ranks that are forked from this process."""

from plumbline.ranks.rank_main import How, RankEnd, UnpicklableError
from plumbline.ranks.run import run_on_ranks

__all__ = ["How", "RankEnd", "UnpicklableError", "run_on_ranks"]
