"""What a step costs: the same as ``pathsgd bench``, see ``--help``."""

import sys

from pathsgd.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
