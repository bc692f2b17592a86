"""What a checked command comes to: right, wrong or not judged, in sentences and an exit code.

How it is shown belongs to ``report/``.
"""
