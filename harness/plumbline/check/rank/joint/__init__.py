"""The right gradient under any parallelism: central differences of the forward that all ranks compute together.

If ranks hold parts of a model, or its forward communicates, no rank can compute the gradient alone, but the forward
still defines the function. S is computed from the recorded inputs of all calls and the gradients at their outputs:

    S(w) = 1/N · Σ over ranks and calls of ⟨outputs of the call at weights w, the gradient that arrived at them⟩
    ⟨right gradient, d⟩ = (S(w + ε d) − S(w − ε d)) / 2ε

N is the number of ranks that compute a loss. No backward pass runs, and the kind of parallelism need not be known.
"""
