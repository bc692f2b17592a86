"""Measures speed and memory: launches whose ranks train in timed rounds, and the figures computed from them."""
