"""What the command-line tools share: devices, tables, options, progress."""
