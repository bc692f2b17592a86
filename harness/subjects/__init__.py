"""The trainers under test. One file a subject, one line in ``SHORT_NAMES``."""
