"""Tables and summaries without markup: a number that two formats show is computed here, once."""
