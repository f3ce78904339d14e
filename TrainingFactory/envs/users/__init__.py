"""Simulated users: a model plays the person that the agent talks to."""

from TrainingFactory.envs.users.conversation import UserConversation, with_simulated_user
from TrainingFactory.envs.users.user import SimulatedUser, UserBrief

__all__ = ["SimulatedUser", "UserBrief", "UserConversation", "with_simulated_user"]
