"""``python -m ptdbg_ascend.parse``: the prompt."""

from trueup_compat.ptdbg_ascend.shell import main

if __name__ == "__main__":
    main()
