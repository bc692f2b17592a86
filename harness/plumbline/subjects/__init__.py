"""The trainers under test. ``SHORT_NAMES`` lists them.

An adapter uses its library as the library's documentation shows. Nothing here looks at what is recorded.
"""
