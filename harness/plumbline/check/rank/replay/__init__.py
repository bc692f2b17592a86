"""The calls of a training's modules, recorded and computed again in float64, which gives the exact local gradients.

What an optimizer does with gradients does not belong here.
"""
