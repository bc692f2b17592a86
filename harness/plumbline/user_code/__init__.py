"""Users' files: importing them, and the traceback of what they raise.

What is in such a file, trainers or workloads, is for the packages above to know.
"""

from __future__ import annotations
