"""Checks a user's unmodified training: whether the ranks together compute what one device would compute.

``command/`` runs the user's command, ``rank/`` records inside its processes, ``evidence/`` defines the recorded data,
``judge/`` judges it, and ``verdict/`` and ``report/`` sum up and show the findings. Plumbline's own problems and
trainers do not belong here.
"""
