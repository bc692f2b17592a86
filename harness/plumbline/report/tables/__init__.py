"""Tables and summaries without markup. A number that several formats show is computed here, once."""
