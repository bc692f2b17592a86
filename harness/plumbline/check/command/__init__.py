"""Runs a user's command with recording on, and finds out how its processes ended and what prevented recording.

The rules that judge a recording do not belong here.
"""
