"""What went wrong, at lines of files: for the systems that run CI."""
