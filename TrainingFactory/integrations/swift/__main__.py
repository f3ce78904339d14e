"""Print the path of the plugin. Unlike `tfactory swift plugin`, this command needs none of our dependencies."""

from TrainingFactory.integrations.swift import PLUGIN

print(PLUGIN)
