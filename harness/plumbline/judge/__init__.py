"""The judge: (trace, workload, cell) in, findings out.

``oracle`` computes the correct values, ``checks`` compare with them, ``causes`` explain what differs, ``consequences``
orders the findings. Pure: no process, clock or file, and no code of any trainer. Launching, storing and showing do not
belong here.
"""
