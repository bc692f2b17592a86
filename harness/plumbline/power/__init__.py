"""Measures the smallest error that the judge notices, by putting known errors into what a right training recorded."""
