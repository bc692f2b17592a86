"""The balanced backend: profiles a module's blocks, finds their optimal partition, and runs it as a pipeline."""
