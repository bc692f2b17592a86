"""Follows a training on a rank: optimizer steps, backward passes, module calls, loss scalers. It never judges.

The recorder of the suites and the recorder of a user's script are both built on it. Each follower notifies the object
that created it, so several of them can follow one training.
"""
