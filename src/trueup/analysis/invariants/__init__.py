"""What holds in each step of a healthy run, learned from its capture and checked on another or while one runs: faults that need no
baseline of the same numbers. `relations` has the relations as queries over the steps of a capture and the file, `conditions` reads
the steps and says what a relation holds under, `learning` has both directions and the check inside a monitor. Nothing is imported
here."""
