"""The one exception that users see: a mistake in what they gave, never in our code."""


class FqvitError(Exception):
    """One line: the thing, what was found, what was expected, what to do. The command line prints it and exits with 2."""
