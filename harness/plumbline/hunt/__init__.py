"""The search for problems on which a trainer computes something else than one device: drawn, trained, judged, shrunk.

Drawing problems, keeping what was found, and showing it without Plumbline (``program``) belong here. Training and
judging one problem is ``engine``'s; what a drawn problem means is ``workloads.generated``'s.
"""

from __future__ import annotations
