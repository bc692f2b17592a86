"""What the evidence of a user's training shows: pure functions from a recorded training to findings.

``judge`` lists the checks. Files without a ``judge_…`` function hold what several checks share. Processes, clocks and
files do not belong here.
"""
