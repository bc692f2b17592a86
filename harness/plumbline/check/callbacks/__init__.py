"""Callbacks for training libraries, which check the training that they are passed to."""
