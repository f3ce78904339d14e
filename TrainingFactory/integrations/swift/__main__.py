"""Print the path of the plugin. Needs none of our dependencies, unlike `tfactory swift plugin`."""

from TrainingFactory.integrations.swift import PLUGIN

print(PLUGIN)
