"""What the tools share: options, devices, tables, files, timing, networks, a user's own code."""
