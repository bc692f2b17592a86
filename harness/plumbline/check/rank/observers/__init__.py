"""Observers of what a training uses and computes besides gradients: data, random numbers, buffers, weights, losses.

Each observer notes facts. The folder ``optimizer/`` covers what an optimizer does.
"""
