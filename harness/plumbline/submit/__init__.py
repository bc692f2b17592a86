"""Submits a run to an engine that owns machines, follows it, and collects what its tasks write.

Which cells each task has, resuming and collecting are the same for every engine. ``engines/`` has what differs, one
file an engine. Ranks inside a task are started by a launcher (``plumbline.launch.launchers``).
"""
