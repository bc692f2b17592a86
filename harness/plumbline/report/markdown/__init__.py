"""Reports as Markdown pages.

Layout for Markdown only; what is shown comes from ``plumbline.report.tables``.
"""
