"""The values that every other package exchanges: cells, backends, precisions, findings, outcomes and errors.

Frozen dataclasses and enums, and nothing outside the standard library. Nothing here starts a process or reads a run.
"""
