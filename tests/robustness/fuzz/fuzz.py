"""Fuzz one reader of untrusted files, guided by coverage, with atheris (libFuzzer for Python).

    python tests/robustness/fuzz/fuzz.py TARGET [libFuzzer options such as -max_total_time=60, or a file to be read once]

A reader may raise only FqvitError, with a one-line message that names the file; an accepted .fqvit must match the reference bit
for bit. Anything else stops the run, as do more than 10 s or 1.5 GB of memory; the file is then saved in build/fuzz.
`make fuzz` runs all targets.
"""

from __future__ import annotations

import random
import sys
import tempfile
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
OPTIONS = ["-timeout=10", "-rss_limit_mb=1500", "-print_final_stats=1"]


class Sources:
    """Finds the modules of the package as plain files: atheris cannot instrument those that an editable install loads."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        path = ROOT / "src" / Path(*name.split("."))
        if path.is_dir():
            return spec_from_file_location(name, path / "__init__.py", submodule_search_locations=[str(path)])
        file = path.with_suffix(".py")
        return spec_from_file_location(name, file) if file.is_file() else None


sys.meta_path.insert(0, Sources)  # type: ignore[arg-type]
INSTRUMENTED = ["fqvit", "tomllib", "tarfile"]

with atheris.instrument_imports(include=INSTRUMENTED):
    from fqvit.errors import FqvitError
    from fqvit.quant.recipe import load_recipe
    from tests.robustness.fuzz.oracle import checked_line
    from tests.robustness.fuzz.readers import READERS
    from tests.robustness.fuzz.rewrite import BY_READER, plain
    from tests.robustness.fuzz.seeds import golden, seeds_of

if "__ATHERIS_INSTRUMENTED__" not in load_recipe.__code__.co_consts:
    sys.exit("atheris: fqvit is not instrumented. Without coverage the fuzzer would only try the same few files.")


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
    with atheris.instrument_imports(include=INSTRUMENTED):
        for name, raw in seeds.items():
            (kept / name).write_bytes(raw)
            one_input(raw)  # imports the modules that readers load lazily, so that they are instrumented, too
    longest = max(2 * max(map(len, seeds.values())), 16384)
    arguments = [sys.argv[0], *OPTIONS, f"-max_len={longest}", f"-artifact_prefix={ROOT}/build/fuzz/{target}-", *given]
    if not any(Path(word).is_file() for word in given):
        arguments += [str(corpus), str(kept)]
    atheris.Setup(arguments, one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
