"""Whether this machine can do a run: one module a kind of question; ``examination`` has them all.

Answers are lines for a person. Nothing here changes the machine.
"""
