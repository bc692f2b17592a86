"""The nightly lane: its stages in pieces, what is known of each piece at which commit, and the page about them.

A piece runs as a stage of the accelerator lane does, with a time limit and without leaving processes behind.
"""
