"""`python -m ottava.compat SCRIPT [ARGS...]`."""

import sys

from ottava.compat.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
