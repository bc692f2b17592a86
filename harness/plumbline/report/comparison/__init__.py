"""Two runs, or the parts of one, compared: outcomes first, then figures. Pure: nothing is started here."""
