"""Running a user's command with recording on: its processes, how they ended, what prevented recording.

Judging what was recorded does not belong here.
"""
