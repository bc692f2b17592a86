"""The commands of ``plumbline``, one file each: ``add_to`` declares its arguments, and a function calls the package.

Parsing and printing only.
"""
