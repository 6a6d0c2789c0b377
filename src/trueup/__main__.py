"""`python -m trueup`."""

import sys

from trueup.cli import main

sys.exit(main())
