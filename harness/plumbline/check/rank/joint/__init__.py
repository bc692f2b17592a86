"""The right gradient of any parallelism: central differences of the forward that all ranks compute together.

Where ranks hold parts of a model, or a forward communicates, no rank has a gradient of its own, but the forward still
defines the function. With the recorded inputs of all calls and the gradients that arrived at their outputs:

    S(w) = 1/N · Σ over ranks and calls of ⟨outputs of the call at weights w, the gradient that arrived at them⟩
    ⟨right gradient, d⟩ = (S(w + ε d) − S(w − ε d)) / 2ε

N is the number of ranks that compute a loss. No backward pass is involved, and nothing is known of the parallelism.
"""
