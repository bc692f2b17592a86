"""The calls of a training's modules, recorded and computed again in float64, which gives the exact local gradients.

It runs on a rank. What an optimizer does with gradients, and what of them is kept, does not belong here.
"""
