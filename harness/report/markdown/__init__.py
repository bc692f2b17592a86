"""Reports as Markdown pages.

Layout for Markdown only; what is shown comes from ``harness.report.tables``.
"""
