"""What differs between types of accelerator: their names, their variables, their library, how they are counted.

Nothing here initialises a device that the caller has not initialised: few runtimes survive a fork.
"""
