"""Read the files of a folder in a process with little memory. Run by test_memory.py.

Prints one line of JSON per file: [name, "accepted" or the error message, growth of peak resident memory in bytes].
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fqvit.errors import FqvitError
from fqvit.runtime.native import Engine
from tests.robustness.fuzz.readers import READERS

MORE = 600 << 20  # bytes of address space beyond the imports: torch and numpy reserve some for threads


def address_space() -> int:
    """Return the address space of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def peak() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    READERS["settings"].read(Path(sys.argv[1]) / "warm-up.toml")
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + MORE, address_space() + MORE))
    for path in sorted(Path(sys.argv[1]).iterdir()):
        target, before = path.name.partition(" ")[0], peak()
        if target not in READERS:
            continue
        try:
            if target == "program":
                Engine(path, 1)  # loads the program; accepted programs are not run
            else:
                READERS[target].read(path)
            said = "accepted"
        except FqvitError as error:
            said = str(error)
        except Exception as error:
            said = f"FINDING {type(error).__name__}: {error}"
        print(json.dumps([path.name, said, peak() - before]), flush=True)


if __name__ == "__main__":
    main()
