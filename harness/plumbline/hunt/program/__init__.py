"""Programs of at most thirty lines that show a failure without Plumbline: what they say, how they are written and run.

``plain_torch`` has what a problem is in source code, ``source`` fills a subject's template with it, and ``run_program``
runs the program. Which failure gets one, and the page about it, are ``write_up``'s.
"""

from __future__ import annotations
