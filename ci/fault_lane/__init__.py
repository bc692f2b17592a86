"""Faults of trainers, machines and files, injected for real."""
