"""Data that ranks write and the judge reads: vectors, facts and options. Needs only the standard library and torch."""
