"""Starts ranks in warm pools of processes, on one machine or many, watches them, and collects their traces.

``launchers`` has one file per way to start ranks; ``remote`` reaches other nodes. Nothing here judges.
"""
