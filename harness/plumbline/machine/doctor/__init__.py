"""Probes of whether this machine can do a run, a module for each kind; ``probes`` lists and runs them.

Their results are lines of text for a person. Nothing here changes the machine.
"""
