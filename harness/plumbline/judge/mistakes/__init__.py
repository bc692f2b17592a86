"""Known mistakes that change a gradient, stated once for all sources of right gradients.

A mistake predicts a ``Combination``: the weight of each micro-batch of each rank. So it can be tried on a subject,
whose gradients an oracle computes, and on a script, whose gradients are computed again. Mistakes that need more than
that, such as other samples, are in ``plumbline.judge.causes.gradient_hypotheses``.

Specificities of mistakes in gradients lie on this scale:

====== ========================================================================================================
900    it depends on something recorded besides the gradient: loss scale, unused parameters, missing tensors, zeros
600    one way to combine the shares of ranks or micro-batches
500    another way of clipping
400    another count as a divisor, or one of several optimizers treated differently
300    some ranks, tensors or micro-batches treated differently from the others
200    another forward: evaluation mode, statistics or loss of each device alone, other samples
100    (``OCCASIONAL``: where a mistake above fits only on some occasions)
below  fitted to the evidence or concluded by elimination; it has to fit at every step
====== ========================================================================================================
"""
