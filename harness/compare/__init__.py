"""Two runs, or the parts of one, held against each other: outcomes first, then figures. Pure: nothing is started."""
