"""A user's own training, unmodified: what it did on each rank, and whether that is what one device would compute.

``command/`` runs the user's command, ``rank/`` records inside its processes, ``evidence/`` is what they write,
``judge/`` reads it, ``verdict/`` and ``report/`` say what it comes to. Plumbline's own problems and trainers do not
belong here.
"""
