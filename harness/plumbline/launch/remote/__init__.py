"""Pools over several nodes."""
