"""What runs on a rank or in a node's fork server.

The standard library, torch and the subject's own library; nothing else, so that it starts fast in any environment.
"""
