"""Speed and memory: groups of ranks that are timed in rounds, and the figures that follow."""
