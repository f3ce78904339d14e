"""Integrations with other projects: reasoning-gym, BFCL, HelloAgents and RL-Factory."""
