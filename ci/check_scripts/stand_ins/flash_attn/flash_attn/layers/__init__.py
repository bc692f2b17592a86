"""Layers on a GPU."""
