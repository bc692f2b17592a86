"""Follows a training on a rank: optimizer steps, backward passes, module calls, loss scalers. It never judges.

The suites' recorder and that of a user's script are both built on it. Each follower tells whoever made it, so that
several of them can listen to one training.
"""
