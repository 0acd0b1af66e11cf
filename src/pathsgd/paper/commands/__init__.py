"""The subcommands that train: each has HELP, DESCRIPTION, add_arguments(parser) and run(options)."""
