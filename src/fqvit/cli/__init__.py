"""The command line: options in app.py and detect.py, what commands do in commands/."""
