"""``python -m trueup_compat.ptdbg_ascend.parse``: the prompt; the function `parse` is in `parsing`."""

from trueup_compat.ptdbg_ascend.shell import main

if __name__ == "__main__":
    main()
