"""A stand-in for flash_attn, which needs a GPU: scripts import it even where they do not use it."""
