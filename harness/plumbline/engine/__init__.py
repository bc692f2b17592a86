"""One cell from launch to findings, and stored traces judged again.

The only package that joins launching, judging and results. What a command or pytest prints does not belong here.
"""
