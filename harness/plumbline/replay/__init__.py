"""Records the module calls of a training and computes them again in float64, which gives exact local gradients.

It runs on a rank. What an optimizer does with gradients, and which part of them is kept, does not belong here.
"""
