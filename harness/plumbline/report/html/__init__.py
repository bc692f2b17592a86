"""``report.html``: one file that works offline.

Templates, charts and escaping only; what is shown comes from ``plumbline.report.tables``.
"""
