"""The judge: (trace, workload, cell) in, findings out.

``oracle`` computes the correct values, ``checks`` compare with them, ``mistakes`` and ``causes`` explain what differs,
``consequences`` marks findings that follow from others. Pure: no process, clock or file, and no code of any trainer.
Launching, storing and showing do not belong here.
"""
