"""Sums up a checked command: right, wrong or not judged, in sentences and an exit code.

``report/`` shows the result.
"""
