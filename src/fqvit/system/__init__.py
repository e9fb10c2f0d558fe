"""Operating system services: atomic files, signals, progress bars and plain-text tables."""
