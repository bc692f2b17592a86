"""A small site about many runs: the history of each cell and figure, and what else changed when it changed."""
