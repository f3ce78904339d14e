"""Sandboxed SQLite: a database for untrusted queries, and comparison of queries by their result rows."""
