"""The pytest plugin for a user's own tests: ``@pytest.mark.ranks(4)`` runs a test's body on four warm ranks.

It is an entry point of the distribution, so every pytest of an environment loads it: it adds no option, and imports
neither torch nor the rest of the harness before a marked test runs. The suites have a plugin of their own,
``pytest_plugin``, of which this one knows nothing.
"""
