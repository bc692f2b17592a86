"""The user's own workloads: loaded from a file or a module, and checked before anything is trained.

Every process loads them itself: the one that plans and judges, a fork server, and a process that a subject starts.
"""
