"""A stand-in for flash_attn, which needs a GPU: scripts import it even if they do not use it."""
