"""Attention on a GPU."""

flash_attn_func = None
