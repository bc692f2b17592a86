"""``report.html``: templates, charts and escaping; what is shown comes from ``plumbline.report.tables``."""
