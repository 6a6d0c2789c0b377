"""`python -m trueup`."""

import sys

from trueup.doors.cli import main

sys.exit(main())
