"""The pytest plugin: options, one test per cell, the run on disk, progress, and the tables at the end."""
