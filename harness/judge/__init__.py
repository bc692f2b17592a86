"""The judge: (trace, workload, cell) in, findings out. No process, no clock, no file, no code of any trainer."""
