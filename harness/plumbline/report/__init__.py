"""What people read: tables made from a run's records, for the terminal, as Markdown, HTML and JSON.

Reads ``plumbline.results`` only. Nothing here launches, judges or measures.
"""
