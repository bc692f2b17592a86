"""The commands of ``plumbline``, one file each. They only parse arguments and print results."""
