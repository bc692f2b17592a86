"""The self-balancing backend: profiles the blocks of a module, partitions them exactly, runs them as a pipeline."""
