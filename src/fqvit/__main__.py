"""Start the command line, for `python -m fqvit` and the console script. Ctrl-C during imports prints no traceback."""

from __future__ import annotations

import os
from typing import NoReturn


def main() -> NoReturn:
    """Install the signal handlers, then import and run the command line."""
    try:
        from fqvit.system import signals

        signals.install()
    except KeyboardInterrupt:  # before the handlers are installed
        os._exit(130)
    from fqvit.cli.app import main as command_line

    command_line()


if __name__ == "__main__":
    main()
