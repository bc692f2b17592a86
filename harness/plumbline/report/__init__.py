"""Reports on a run's records, in every format. Nothing here launches, judges or measures."""
