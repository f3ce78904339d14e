"""Adapters of other packages' environments, and the server that runs them. Every file runs in the virtual environment
of its package with Python 3.10 or later, and imports neither TrainingFactory nor another adapter."""
