"""The judge: (trace, workload, cell) in, findings out. No process, no clock, no file, no code of any trainer.

``oracle`` computes what is right, ``checks`` compare, ``causes`` explain what differs.
"""
