"""Submits a run to an engine that owns machines (one file each in ``engines/``), follows it, and collects results."""
