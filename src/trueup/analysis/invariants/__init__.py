"""What holds in each step of a healthy run, learned from its capture and checked on another or while one runs: faults that need no
baseline of the same numbers. `steps` reads a capture, `relations` has the relations as queries over it and the file, `conditions`
what a relation holds under, `learning` both directions, `live` the check inside a monitor. Nothing is imported here."""
