"""What people read: tables made from a run's records, for the terminal, as Markdown, HTML and JSON.

Reads ``harness.results`` only. Nothing here launches, judges or measures.
"""
