"""The records of a run on disk: written as findings fall, read back, resumed.

No pickle, and no judgement: a record says what was found.
"""
