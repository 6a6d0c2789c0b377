"""What stands around a run that moves to another device: the port of its script, what its logs say. No comparison is made here."""
