"""Measures speed and memory: groups of ranks that are timed in rounds, and the figures that follow.

Statistics over figures belong to ``harness.statistics``; tables of them to ``harness.report``.
"""
