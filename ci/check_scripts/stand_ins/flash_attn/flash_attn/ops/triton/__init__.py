"""Kernels of Triton."""
