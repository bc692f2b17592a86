"""Launchers side by side: clusters on one machine, and what is measured and injected there."""
