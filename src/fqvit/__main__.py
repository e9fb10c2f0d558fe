"""`python -m fqvit` and the console script: the command line, which can be stopped without a traceback while it is imported."""

from __future__ import annotations

from typing import NoReturn


def main() -> NoReturn:
    from fqvit import stops

    stops.install()
    from fqvit.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
