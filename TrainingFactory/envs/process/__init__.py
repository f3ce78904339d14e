"""Environments in other processes, which speak the protocol of docs/ENVIRONMENTS.md."""
