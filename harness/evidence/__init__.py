"""The trace of a launch: the format that ranks write and that the judge and the results read.

Reading, writing, joining shards and projecting large tensors belong here; deciding whether a trace is right does not.
Modules that a rank imports (``write``, ``rank_file``, ``projection``, ``timing``) need only the standard library and
torch.
"""
