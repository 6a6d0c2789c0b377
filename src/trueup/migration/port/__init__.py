"""Training scripts written anew for another device: what is a device, and what only has its letters."""

from trueup.migration.port.porting import Changed, Ported, port, undo

__all__ = ["Changed", "Ported", "port", "undo"]
