"""Starts ranks, watches them and collects what they leave: warm pools of processes, on one machine or many.

``local`` holds what is needed on this machine, ``remote`` what is needed to reach other nodes. Nothing here judges.
"""
