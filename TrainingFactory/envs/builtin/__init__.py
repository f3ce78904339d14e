"""Built-in environments: search, calculator and text2sql."""
