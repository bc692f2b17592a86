"""Submits a run to an engine that owns machines, follows it, and collects the results of its tasks.

``engines/`` has one file per engine; everything else is the same for all. Inside a task, a launcher starts the ranks
(``plumbline.launch.launchers``).
"""
