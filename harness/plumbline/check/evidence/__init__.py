"""What ranks write and the judge reads: vectors, facts and options. Standard library and torch only."""
