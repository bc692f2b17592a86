"""The records of a run on disk, as strict JSON: written while the run goes on, read back, resumed."""
