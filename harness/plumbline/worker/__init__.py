"""The code on ranks and in fork servers.

It imports only the standard library and torch, so that it starts fast in any environment.
"""
