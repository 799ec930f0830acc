"""``python -m tilestream``: the command line."""

import sys

from tilestream.cli import main

sys.exit(main())
