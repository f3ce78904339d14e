"""Environments in containers: task folders of Harbor and Terminal-Bench. See docs/CONTAINERS.md."""
