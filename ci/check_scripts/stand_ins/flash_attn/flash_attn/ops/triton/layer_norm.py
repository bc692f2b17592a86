"""Layer normalisation on a GPU."""

layer_norm_fn = None
