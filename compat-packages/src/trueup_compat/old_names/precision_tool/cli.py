"""`python3 precision_tool/cli.py`, answered by `trueup_compat.precision_tool.cli`."""

from trueup_compat.precision_tool.cli import main

if __name__ == "__main__":
    main()
