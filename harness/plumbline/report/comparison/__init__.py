"""Compares two runs, or the cells of one run: outcomes first, then figures. Nothing is launched here."""
