"""Turns the user's options into a list of cells, and reads the expected failures of subjects. Launches nothing."""
