"""``python3 -m msaccucmp compare -m MY.h5 -g GOLDEN.h5``, answered by `trueup_compat.dumper`."""

from trueup_compat.dumper.__main__ import main

if __name__ == "__main__":
    main()
