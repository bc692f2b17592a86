"""Estimates and intervals from small samples, and the comparison of two samples. Pure functions over numbers.

Nothing here knows what is measured.
"""
