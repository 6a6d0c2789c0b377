"""What stands around a run that moves to another device: the port of its script. No comparison is made here."""
