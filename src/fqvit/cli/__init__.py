"""Implement the command line: options in app.py, detect.py and options.py, the work of each command in commands/."""
