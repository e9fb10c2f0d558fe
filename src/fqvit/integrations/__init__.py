"""Use programs inside other systems: Ray Data."""
