"""The pytest plugin: options, one test a cell, the run on disk, progress and the table at the end.

Glue between pytest and the engine. What could run without pytest belongs elsewhere.
"""
