"""How ranks come to life, and how they end."""
