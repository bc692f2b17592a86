"""What a terminal shows of a run.

Layout for a terminal only; what is shown comes from ``plumbline.report.tables``.
"""
