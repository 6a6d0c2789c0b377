"""Calls executed once more, on behalf of a user: replay of a capture, one call alone (reproduce), what is left of a shadow."""
