"""The entry point of `python -m teraio`, which runs the command line."""

import sys

from teraio.cli.main import main

sys.exit(main())
