"""A run over the nodes of a cluster: one job array over the matrix, whose parts become one run."""
