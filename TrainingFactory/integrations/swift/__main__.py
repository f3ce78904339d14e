"""Print the path of the plugin. Unlike `tfactory swift plugin`, this command needs none of our dependencies."""

from TrainingFactory.integrations.swift import PLUGIN_FILE

print(PLUGIN_FILE)
