"""What joins TrainingFactory with the packages of others."""
