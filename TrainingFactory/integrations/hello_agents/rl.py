"""The names of `hello_agents.rl`, on our trainers."""

# ruff: noqa: F401
from TrainingFactory.integrations.hello_agents.datasets import (
    GSM8KDataset,
    create_math_dataset,
    create_rl_dataset,
    create_sft_dataset,
    format_math_dataset,
    preview_dataset,
)
from TrainingFactory.integrations.hello_agents.rewards import (
    MathRewardFunction,
    create_accuracy_reward,
    create_length_penalty_reward,
    create_step_reward,
    evaluate_rewards,
)
from TrainingFactory.integrations.hello_agents.trainers import (
    GRPOTrainerWrapper,
    PPOTrainerWrapper,
    SFTTrainerWrapper,
    TrainingConfig,
    setup_training_environment,
)

TRL_AVAILABLE = True  # what it stands for: everything that training needs is here
