"""What holds in each step of a healthy run, learned from its capture and checked on another or while one runs: faults that need no
baseline of the same numbers. `conditions` reads the steps and says what a relation holds under, `relations` has the relations as
queries over them and the file, and learns and checks them, also inside a monitor. Nothing is imported here."""
