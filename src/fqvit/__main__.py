"""`python -m fqvit` and the console script: the command line, which can be stopped without a traceback while it is imported."""

from __future__ import annotations

import os
from typing import NoReturn


def main() -> NoReturn:
    try:
        from fqvit.system import signals

        signals.install()
    except KeyboardInterrupt:  # before anybody took it
        os._exit(130)
    from fqvit.cli.app import main as command_line

    command_line()


if __name__ == "__main__":
    main()
