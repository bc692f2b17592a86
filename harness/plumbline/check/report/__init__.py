"""Shows a verdict on a terminal, or writes it as JSON, HTML, Markdown or SARIF."""
