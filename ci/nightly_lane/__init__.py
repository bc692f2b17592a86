"""The nightly lane: stages in pieces, the results of each piece with their commits, and the page about them.

A piece runs like a stage of the accelerator lane: with a time limit, and without leaving processes behind.
"""
