"""TrainingFactory: turn a tool set and a reward into a trained agent.

Imports point strictly down; siblings on one line do not import each other:

    cli, web > integrations > services > cluster > rollout, sampling, learning
    > envs, rewards, algorithms > tools, models, data > catalog, config, workers
    > protocols, openai_form, options > types
"""

__version__ = "0.1.0"
