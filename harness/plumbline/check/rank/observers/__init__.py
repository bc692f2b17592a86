"""What a training uses and computes beside gradients: data, random numbers, buffers, weights, losses.

Each observer notes facts; what an optimizer does belongs to ``optimizer/``.
"""
