"""Runs inside the processes of a user's script: records, replays and writes evidence, and changes no result.

It needs only the standard library and torch. It does not decide whether a training is right.
"""
