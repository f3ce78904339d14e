"""Integrations with other projects: reasoning-gym, BFCL, HelloAgents, RL-Factory and ms-swift."""
