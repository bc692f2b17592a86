"""From the user's options to a list of cells, and what is expected of a subject. Nothing is launched here."""
