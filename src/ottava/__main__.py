"""`python -m ottava` is the `ottava` command."""

import sys

from ottava.cli.main import main

sys.exit(main())
