"""Shows a verdict: on a terminal, as JSON, as one page of HTML."""
