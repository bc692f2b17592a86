"""Measures a rank's steps: time, memory and communication. Timed launches are not recorded."""
