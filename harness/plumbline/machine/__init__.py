"""The local machine: fingerprint, load, device locks, and the doctor's probes."""
