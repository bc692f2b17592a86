"""The records of a run on disk: written while the run goes on, read back, resumed.

Strict JSON, no pickle. Nothing here judges or formats a report.
"""
