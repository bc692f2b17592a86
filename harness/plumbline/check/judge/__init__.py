"""What the evidence of a user's training shows: pure functions from a recorded training to findings.

One file a check; ``plumbline.check.judge.judge`` has the list. Processes, clocks and files do not belong here.
"""
