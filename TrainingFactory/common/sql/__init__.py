"""SQLite without risk: a database that foreign queries may ask, and queries compared by their rows."""
