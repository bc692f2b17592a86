"""Is a machine fit for a run? Questions to it, a file a kind; ``examination`` has them all."""
