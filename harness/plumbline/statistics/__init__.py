"""Estimates and intervals from small samples, and the comparison of two samples. Pure functions over numbers.

Nothing here depends on what was measured.
"""
