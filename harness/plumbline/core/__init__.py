"""The values that all packages exchange: cells, backends, precisions, findings, outcomes and errors.

Standard library only. Nothing here starts a process or reads a run.
"""
