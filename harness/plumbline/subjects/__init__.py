"""The trainers under test. ``SHORT_NAMES`` lists them.

An adapter uses its library as the library's documentation shows. No adapter accesses the recorded data.
"""
