"""The trace of a launch: its values (``trace``), the file of a rank (``trace_file``), and a reader (``read``).

Reading, writing, joining shards, storing and projecting large tensors belong here; deciding whether a trace is right
does not. Imports nothing above ``core``. Modules that a rank imports (all but ``read``) need only the standard library
and torch.
"""
