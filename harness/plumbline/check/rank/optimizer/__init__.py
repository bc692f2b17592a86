"""Observes what happens between a backward pass and the next forward: clipping, loss scale, learning rate, update.

Each observer notes facts about a step. Forwards and data do not belong here.
"""
