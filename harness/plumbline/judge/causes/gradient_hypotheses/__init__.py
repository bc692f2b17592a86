"""Known mistakes that change a gradient; each predicts the gradient that it would have produced.

A file registers its hypotheses, and ``plumbline.judge.causes`` imports it. Mistakes that need no oracle are in
``plumbline.judge.mistakes``, with the scale of specificities.
"""
