"""Load mutated .fqvit files with the native library and a WebAssembly module, which must agree; run accepted ones on both.

    python tests/wasm/campaign.py --count 10000 --seed 1 [--variant simd128]

The files are those of tests/robustness/fuzz/campaign.py with the same seed. Both loaders must accept the same files, and reject
the others with the same message; a trap is a finding. Files with findings are saved in build/fuzz, and the exit code is
then 1.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fqvit.errors import FqvitError  # noqa: E402
from fqvit.runtime.native import Engine  # noqa: E402
from tests.wasm.node import EngineError, Node, Trap  # noqa: E402

FINDINGS = ROOT / "build" / "fuzz"
MOST_MACS, MOST_PIXELS = 1 << 25, 1 << 16  # larger programs are loaded but not run


class Finding(Exception):
    """A file about which the two loaders disagree."""


def judge_program(node: Node, raw: bytes, path: Path, seed: int) -> str:
    """Return "accepted" or "rejected"."""
    path.write_bytes(raw)
    native: Engine | str
    try:
        native = Engine(path, 1)
    except FqvitError as error:
        native = str(error).removeprefix(f"{path}: ")
    try:
        model = node.load("model", raw)
    except EngineError as error:
        if not isinstance(native, str):
            raise Finding(f"only the module rejects the file: {error}") from None
        if str(error) != native:
            raise Finding(f"the module says {str(error)!r}, the native library {native!r}") from None
        return "rejected"
    except Trap as error:
        raise Finding(f"trap: {error}") from None
    if isinstance(native, str):
        raise Finding(f"only the native library rejects the file: {native}")
    if native.macs <= MOST_MACS and np.prod(native.input_shape) <= MOST_PIXELS:
        images = np.random.default_rng(seed).integers(0, 256, (2, *native.input_shape)).astype(np.uint8)
        expected, found = native.run_all(images), node.run(model["handle"], images)
        if [array.tobytes() for array in expected] != found:
            raise Finding("the outputs differ")
    node.call("free", kind="model", handle=model["handle"])
    return "accepted"


def judge_detector(node: Node, raw: bytes) -> str:
    """Load a detector; errors must be messages, not traps. tests/wasm/test_golden.py compares the results of detectors."""
    try:
        detector = node.load("detector", raw)
    except EngineError:
        return "rejected"
    except Trap as error:
        raise Finding(f"trap: {error}") from None
    node.call("free", kind="detector", handle=detector["handle"])
    return "accepted"


def campaign(variant: str, count: int, seed: int) -> tuple[collections.Counter[str], list[str]]:
    """Judge `count` mutated files; return the counts of outcomes and the findings."""
    from tests.robustness.fuzz.campaign import Files

    files, counts, findings = Files(seed), collections.Counter[str](), []
    with Node(variant) as node, tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            kind, raw = files.make(number)
            path = Path(folder) / f"{number}.fqvit"
            try:
                if kind == "detector":
                    outcome = judge_detector(node, raw)
                else:
                    outcome = judge_program(node, raw, path, random.Random(number).randrange(1 << 30))
            except Finding as finding:
                outcome = "FINDING"
                findings.append(f"file {number}: {finding}")
                FINDINGS.mkdir(parents=True, exist_ok=True)
                (FINDINGS / f"wasm-{number}.fqvit").write_bytes(raw)
            counts[f"{kind}: {outcome}"] += 1
            path.unlink(missing_ok=True)
    return counts, findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variant", default="simd128")
    arguments = parser.parse_args()
    counts, findings = campaign(arguments.variant, arguments.count, arguments.seed)
    for line in findings:
        print(line, file=sys.stderr)
    for name, count in sorted(counts.items()):
        print(f"{count:9}  {name}")
    raise SystemExit(1 if findings else 0)


if __name__ == "__main__":
    main()
