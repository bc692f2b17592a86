"""Tables and summaries computed from records, without markup: what each format then writes down.

A number that two formats show is computed here, once.
"""
