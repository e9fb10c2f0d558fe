"""Files, signals and the terminal: what every other package may use. It depends on nothing but errors.py."""
