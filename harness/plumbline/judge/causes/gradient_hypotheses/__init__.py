"""Known mistakes that change a gradient, one file a family; each predicts the gradient that it would have produced.

A file ends with ``HYPOTHESES``, and ``plumbline.judge.causes.registry`` has one line for it. Specificities of gradient
hypotheses lie on this scale:

====== ========================================================================================================
900    it depends on something recorded besides the gradient: loss scale, unused parameters, missing tensors, zeros
600    one way to combine the shares of ranks or micro-batches
500    another way of clipping
400    another count as a divisor, or one of several optimizers treated differently
300    some ranks, tensors or micro-batches treated differently from the others
200    another forward: evaluation mode, statistics or loss of each device alone, other samples
100    (``OCCASIONAL``: where a hypothesis above fits only on some occasions)
below  fitted to the evidence or concluded by elimination; it has to fit at every step
====== ========================================================================================================
"""
