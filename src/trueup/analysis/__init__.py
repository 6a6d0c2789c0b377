"""What is done with captures beside comparing them. Stands on comparison and recording; no error formula is written here."""
