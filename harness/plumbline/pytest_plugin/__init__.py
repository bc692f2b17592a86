"""The pytest plugin: options, one test for each cell, the run on disk, progress and the tables at the end.

It connects pytest to the engine. What could run without pytest belongs elsewhere.
"""
