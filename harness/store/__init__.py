"""The run's records on disk, and what machine they came from. See DESIGN section 7 for the names on disk."""
