"""``report.html``: templates, charts and escaping. Its contents come from ``plumbline.report.tables``."""
