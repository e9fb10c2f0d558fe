"""Write programs in the byte format of program.h: small ones as seeds of the fuzzer, larger ones for the sanitizers.

python native/fuzz/make_seeds.py native/fuzz/seeds            # one or two ops each; these are committed
python native/fuzz/make_seeds.py --networks build/seeds       # also wide ops, whole networks and the golden files
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from fqvit.detect.batch import batched  # noqa: E402
from fqvit.ir.program import Program  # noqa: E402
from tests.detect.test_programs import lowered, packed  # noqa: E402
from tests.ir.draw import STYLES, Draw  # noqa: E402
from tests.robustness.hostile.encoding import encoded  # noqa: E402
from tests.robustness.hostile.records import Record, Recorded, recorded  # noqa: E402
from tests.robustness.hostile.test_native_engine import BEFORE, IMAGE, NOTHING, VALID, i32, i64, linear_arrays  # noqa: E402
from tests.runtime.programs import program_with  # noqa: E402
from tests.runtime.wide import accepted  # noqa: E402
from tests.runtime.wide_moves import EVERY_WIDE  # noqa: E402

SMALL = 4000  # bytes per seed, at most: the fuzzer mutates small ones faster


def single_ops() -> dict[str, bytes]:
    """Return one program per op, after the ops that make its inputs."""
    found = {}
    for style, (tag, record) in enumerate(VALID.items()):
        found[tag] = encoded(Recorded(IMAGE, [*BEFORE, record], len(BEFORE) + 1), style % 4)
    return found


def several_outputs() -> dict[str, bytes]:
    """Return a small head that takes codes (a convolution, then two layers), with outputs that prevent fusion."""
    positions = np.arange(8, dtype=np.int32)
    index = np.stack([positions - 1, positions, np.where(positions == 7, -1, positions + 1)], -1).astype(np.int32)
    records = [
        Record("take", [0], [], [index, i32(128)]),
        Record("permute", [1], [], [i64(8, 9), i64(0, 1), i64(), i64()]),
        Record("linear", [2], [0, 8], linear_arrays(9, 4)),
        Record("permute", [3], [], [i64(1, 1, 32), i64(0, 1, 2), i64(), i64()]),
        Record("linear", [4], [0, 8], linear_arrays(32, 6)),
        Record("linear", [5], [1, 8], [*linear_arrays(6, 3)[:2], NOTHING, NOTHING, NOTHING]),
        Record("linear", [5], [2, 8], [*linear_arrays(6, 5)[:4], NOTHING]),
        Record("lookup", [5], [8], [np.arange(255, -1, -1).astype(np.uint8), NOTHING, i32()]),
    ]
    outputs = {"head": [6, 7], "joined": [8, 5], "gathered": [3, 2, 1], "all": [*range(1, 9)]}
    return {
        f"outputs_{name}": encoded(Recorded((4, 2, 3), records, first, others), style % 4)
        for style, (name, (first, *others)) in enumerate(outputs.items())
    }


def wide_ops(count: int, largest: int, styles: int) -> dict[str, bytes]:
    """Return the first `count` programs of every kind that have at most `largest` bytes."""
    found = {}
    for kind, case in EVERY_WIDE.items():
        taken = 0
        for seed in range(4000):
            draw = Draw(np.random.default_rng(seed), STYLES[seed % 4])
            ops = case(draw)
            if not accepted(draw, ops) or sum(x.nbytes for x in draw.buffers.values()) > largest:
                continue
            data = encoded(recorded(program_with(draw, *ops)[0]), seed % styles)
            if len(data) <= largest:
                found[f"{kind.replace(' ', '_').replace(',', '').replace('+', 'and')}_{taken}"] = data
                taken += 1
            if taken == count:
                break
    return found


def networks() -> dict[str, bytes]:
    golden = {path.stem: path for path in sorted((ROOT / "tests" / "golden").glob("*_v1.fqvit"))}
    found = {name: encoded(recorded(Program.load(path))) for name, path in golden.items()}
    for name, low in (("packed", packed()), ("cascade", lowered("cascade of 4conv1fc", "fqvit"))):
        parts = {"pyramid": low.pyramid(32, 64), "box": batched(low.boxes[0], 5), "mask": low.masks[0]}
        found |= {f"detector_{name}_{part}": encoded(recorded(program)) for part, program in parts.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", action="store_true")
    arguments = parser.parse_args()
    seeds = single_ops() | several_outputs() | wide_ops(8, SMALL, 4)
    if arguments.networks:
        seeds |= {f"large_{name}": data for name, data in wide_ops(25, 2**18, 1).items()} | networks()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds.items():
        (arguments.folder / name).write_bytes(data)
    sys.stdout.write(f"{len(seeds)} programs, {sum(map(len, seeds.values()))} bytes\n")


if __name__ == "__main__":
    main()
