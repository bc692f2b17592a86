"""What happens between the backward pass and the next forward: clipping, loss scale, learning rate, the update.

Each observer notes facts of a step; forwards and data do not belong here.
"""
