"""The ways in and out: reports, the command line, the shell, and the public functions behind ``trueup``.

Nothing below imports a door.
"""
