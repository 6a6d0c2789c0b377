"""What holds in each step of a healthy run, learned from its capture and checked on another: faults that need no baseline of the
same numbers. `learning` has the relations and both directions. Used by ``trueup invariants``. Nothing is imported here."""
