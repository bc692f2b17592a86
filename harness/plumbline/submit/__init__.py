"""Submits a run to an engine that owns machines (one file each in ``engines/``), follows it, collects results."""
