"""Records what happens on a rank while a subject trains: batches, gradients, weights, buffers, metrics.

Hooks and copies only. A rank never judges what it recorded.
"""
