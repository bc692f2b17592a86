"""What differs between types of accelerator: names, environment variables, communication libraries, and counting.

Nothing here initialises a device that the caller has not initialised: few runtimes survive a fork.
"""
