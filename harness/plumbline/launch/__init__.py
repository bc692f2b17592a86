"""Starts ranks, watches them and collects what they leave: warm pools of processes, on one machine or many.

``launchers`` has one file per way to start ranks, ``remote`` what is needed to reach other nodes. Nothing here judges.
"""
