"""The one exception that users see: a mistake in what they gave, never in our code."""

import re

# What ends a line or commands a terminal: a foreign file may have it in a name, and names are in messages.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
LONGEST = 2000  # letters; a foreign name may be longer


class FqvitError(Exception):
    """One line: the thing, what was found, what was expected, what to do. The command line prints it and exits with 2."""

    def __init__(self, message: str) -> None:
        line = CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), message)
        if len(line) > LONGEST:
            line = f"{line[: LONGEST * 3 // 4]} ... {line[-LONGEST // 5 :]}"
        super().__init__(line)
