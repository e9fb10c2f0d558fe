"""Define FqvitError, the only exception for user mistakes. Any other exception is a bug in fqvit."""

import re

# Characters that end a line or control a terminal. Messages quote names from untrusted files, which may contain them.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
LONGEST = 2000  # characters; a name in an untrusted file may be longer


class FqvitError(Exception):
    """An error with a one-line message: `<thing>: <what was found>, expected <what>. <what to do>.`

    The command line prints it without a traceback and exits with code 2.
    """

    def __init__(self, message: str) -> None:
        line = CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), message)
        if len(line) > LONGEST:
            line = f"{line[: LONGEST * 3 // 4]} ... {line[-LONGEST // 5 :]}"
        super().__init__(line)
