"""What ranks write and the judge reads: vectors, facts, and the options that a rank is told.

Verdicts do not belong here; what writes runs with the standard library and torch only.
"""
