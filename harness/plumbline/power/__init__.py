"""Measures the smallest error that the judge detects, by injecting known errors into records of right trainings."""
