"""Coverage-guided fuzzing of one reader of foreign bytes, by atheris (libFuzzer for Python):

    python tests/fuzz/fuzz.py TARGET [libFuzzer options such as -max_total_time=60, or a file to be read once]

Only FqvitError may come out, in one line that names the file; an accepted .fqvit must give the reference's integers. Everything
else stops the run, as does more than 10 s or a GB of memory; the file is then kept in build/fuzz. `make fuzz` runs all targets.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
OPTIONS = ["-timeout=10", "-rss_limit_mb=1500", "-print_final_stats=1"]

with atheris.instrument_imports(include=["fqvit", "tomllib", "tarfile"]):
    from fqvit.errors import FqvitError
    from tests.fuzz.readers import READERS

from tests.fuzz.oracle import checked_line  # noqa: E402
from tests.fuzz.rewrite import BY_READER, plain  # noqa: E402
from tests.fuzz.seeds import golden, seeds_of  # noqa: E402


def main() -> None:
    target, *given = sys.argv[1:]
    reader, rewrite = READERS[target], BY_READER.get(target, plain)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    path = folder / f"file{reader.ending}"

    def one_input(data: bytes) -> None:
        path.write_bytes(data)
        try:
            reader.read(path)
        except FqvitError as error:
            checked_line(error, path)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        return rewrite(data, most, random.Random(seed), atheris.Mutate)

    kept, corpus = (ROOT / "build" / "fuzz" / "readers" / target / name for name in ("seeds", "corpus"))
    for made in (kept, corpus):
        made.mkdir(parents=True, exist_ok=True)
    small = {name: raw for name, raw in golden().items() if len(raw) < 30_000} if target == "program" else {}
    seeds = seeds_of(target) | small
    for name, raw in seeds.items():
        (kept / name).write_bytes(raw)
        one_input(raw)  # what is imported when it is first needed is imported now
    longest = max(2 * max(map(len, seeds.values())), 16384)
    arguments = [sys.argv[0], *OPTIONS, f"-max_len={longest}", f"-artifact_prefix={ROOT}/build/fuzz/{target}-", *given]
    if not any(Path(word).is_file() for word in given):
        arguments += [str(corpus), str(kept)]
    atheris.Setup(arguments, one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
