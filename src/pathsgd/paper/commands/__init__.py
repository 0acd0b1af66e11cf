"""The subcommands of the study."""
