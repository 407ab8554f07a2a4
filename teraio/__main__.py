"""`python -m teraio` is the command line."""

import sys

from teraio.cli.main import main

sys.exit(main())
