"""Measures speed and memory: launches whose ranks train in timed rounds, and the figures computed from them.

Statistics over figures belong to ``plumbline.statistics``; tables of them to ``plumbline.report``.
"""
