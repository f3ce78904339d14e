"""Environments that come with the package: search, calculator and text2sql."""
