"""Callbacks of training libraries that check the training which they are given to."""
