"""A user's own training, unmodified: what it did on each rank, and whether that is what one device would compute.

``rank/`` runs inside the user's processes and records, ``judge/`` reads what was recorded. Training problems and
trainers that Plumbline brings along do not belong here.
"""
