"""The local machine: its fingerprint, its load, locks on it and its devices, and the doctor's probes.

Nothing here depends on cells or findings.
"""
