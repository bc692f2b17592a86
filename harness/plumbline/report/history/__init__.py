"""A small site about many runs: what each cell and figure was, when it changed, and what else changed then."""
