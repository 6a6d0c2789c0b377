"""The ways in and out: reports, command line, shell, and the public functions behind ``trueup``. Nothing below imports a door."""
