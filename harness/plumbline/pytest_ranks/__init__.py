"""The pytest plugin for a user's own tests: ``@pytest.mark.ranks(4)`` runs a test's body on four warm ranks.

It is an entry point of the distribution, so every pytest in the environment loads it. It therefore adds no option, and
imports neither torch nor the rest of the harness before a marked test runs. It does not depend on ``pytest_plugin``,
the plugin of the suites.
"""
