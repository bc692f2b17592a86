"""What runs inside the processes of a user's script: it records, replays and writes evidence, and changes no result.

Only the standard library and torch are needed here. Nothing here decides whether a training is right.
"""
