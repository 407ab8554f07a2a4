"""`python -m teraio` is the command line."""

import sys

from teraio.cli import main

sys.exit(main())
