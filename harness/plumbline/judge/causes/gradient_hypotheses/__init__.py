"""Known mistakes that change a gradient; each predicts the gradient that it would have produced.

A file ends with ``HYPOTHESES``, and ``plumbline.judge.causes`` has one line for it. Mistakes that need no
oracle are in ``plumbline.judge.mistakes``, with the scale of specificities.
"""
