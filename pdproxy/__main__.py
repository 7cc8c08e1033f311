"""`python -m pdproxy` is the command `pdproxy`."""

import sys

from pdproxy.cli import main

if __name__ == "__main__":
    sys.exit(main())
