"""The commands of ``plumbline``, one file each: ``add_to`` says how one is called, and a function does it."""
