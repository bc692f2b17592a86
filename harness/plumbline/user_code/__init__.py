"""Users' files: importing them, and the tracebacks of what they raise."""
