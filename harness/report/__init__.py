"""What people read: tables made from the store's records, for the terminal, as Markdown and as CSV."""
