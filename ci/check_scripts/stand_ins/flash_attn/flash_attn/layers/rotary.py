"""Rotary embeddings on a GPU."""

apply_rotary_emb = None
