"""The trainers under test. One file a subject, one line in ``SHORT_NAMES``.

An adapter uses its library as the library's documentation does; nothing here looks at what is recorded.
"""
