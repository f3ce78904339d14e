from TrainingFactory.cli.app import main

main()
