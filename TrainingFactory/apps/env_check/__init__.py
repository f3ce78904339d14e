"""`tfactory envs check`: checks of an environment before training."""
