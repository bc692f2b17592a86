"""The user's own workloads: loaded from a file or a module, and checked before anything is trained.

Every process loads them itself: the process that plans and judges, fork servers, and processes that a subject starts.
"""
