"""Write .fqvit files: small ones as seeds of the fuzzer, larger ones for the sanitizers.

python native/fuzz/make_seeds.py native/fuzz/seeds            # at most twelve ops each; these are committed
python native/fuzz/make_seeds.py --networks build/seeds       # also larger ops, the golden files and networks of detectors
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from fqvit.detect.batch import batched  # noqa: E402
from fqvit.ir.file import PROGRAM, container  # noqa: E402
from fqvit.ir.moves import Permute, Take  # noqa: E402
from fqvit.ir.ops import Linear, Lookup  # noqa: E402
from fqvit.ir.program import INPUT, Header, Program, encode_header  # noqa: E402
from tests.detect.test_programs import lowered, packed  # noqa: E402
from tests.ir.draw import STYLES, Draw  # noqa: E402
from tests.robustness.hostile.small_programs import CASES, header_of, linear_parts, program_of  # noqa: E402
from tests.runtime.programs import program_with  # noqa: E402
from tests.runtime.wide import accepted  # noqa: E402
from tests.runtime.wide_moves import EVERY_WIDE  # noqa: E402

SMALL = 8000  # maximum bytes per seed: the fuzzer mutates small seeds faster


def written(program: Program, style: int = 0) -> bytes:
    """Return the bytes of a program. style: pixels of the test image (0: random, 1: all 0, 2: all 255, 3: 0 and 255 mixed)

    The fuzzer reads the style from the number of calibration images, which has no other effect.
    """
    program = Program(msgspec.structs.replace(program.header, images=style), program.constants)
    program.verify()
    return container(PROGRAM, encode_header(program.header), program.fingerprint(), program.constants)


def file_name(name: str) -> str:
    return name.replace(" ", "_").replace(",", "").replace("+", "and")


def single_ops() -> dict[str, bytes]:
    """Return one program per op; it contains the op after the ops that compute its inputs."""
    return {file_name(name): written(program_of(case), style % 4) for style, (name, case) in enumerate(CASES.items())}


def several_outputs() -> dict[str, bytes]:
    """Return a small head (a convolution, then two layers), with outputs that prevent fusion."""
    places = np.arange(8, dtype=np.int32)
    index = np.stack([places - 1, places, np.where(places == 7, -1, places + 1)], -1).astype(np.int32)
    ops = (
        Take(y="gathered", x=INPUT, index="neighbours", fill=128),
        Permute(y="rows", x="gathered", view=(8, 9), perm=(0, 1)),
        Linear(y="convolved", x="rows", y_zero=7),
        Permute(y="flat", x="convolved", view=(32,), perm=(0,)),
        Linear(y="hidden", x="flat", y_zero=7),
        Linear(y="classes_", x="hidden", out="acc"),
        Linear(y="boxes", x="hidden", out="i32"),
        Lookup(y="activated", x="hidden"),
    )
    sizes = {"convolved": (9, 4), "hidden": (32, 6), "classes_": (6, 3), "boxes": (6, 5)}
    constants = {name: array for y, size in sizes.items() for name, array in linear_parts(y, *size).items()}
    constants |= {"neighbours": index, "activated.table": np.arange(255, -1, -1).astype(np.uint8)}
    kinds = {"classes_": "logits", "boxes": "deltas", "activated": "embedding", "hidden": "signs", "flat": "pooled"}
    kinds |= {"convolved": "tokens", "rows": "tokens", "gathered": "map"}
    outputs = {"head": ("classes_", "boxes"), "joined": ("activated", "hidden"), "gathered": ("convolved", "rows", "gathered")}
    found = {}
    for style, (name, buffers) in enumerate((outputs | {"all": tuple(kinds)}).items()):
        every = [{"buffer": buffer, "kind": kinds[buffer], "scale": 1.0, "name": f"{buffer}@0"} for buffer in buffers]
        plain = msgspec.convert(header_of([], *every, image=(4, 2, 3)), Header)
        found[f"outputs_{name}"] = written(Program(msgspec.structs.replace(plain, ops=ops), constants), style % 4)
    return found


def wide_ops(count: int, largest: int, styles: int) -> dict[str, bytes]:
    """Return `count` programs per case in EVERY_WIDE, each of at most `largest` bytes. styles: number of image styles."""
    found = {}
    for kind, case in EVERY_WIDE.items():
        taken = 0
        for seed in range(4000):
            draw = Draw(np.random.default_rng(seed), STYLES[seed % 4])
            ops = case(draw)
            if not accepted(draw, ops) or sum(x.nbytes for x in draw.buffers.values()) > largest:
                continue
            data = written(program_with(draw, *ops)[0], seed % styles)
            if len(data) <= largest:
                found[f"{file_name(kind)}_{taken}"] = data
                taken += 1
            if taken == count:
                break
    return found


def networks() -> dict[str, bytes]:
    found = {path.stem: path.read_bytes() for path in sorted((ROOT / "tests" / "golden").glob("*_v?.fqvit"))}
    for name, low in (("packed", packed()), ("cascade", lowered("cascade of 4conv1fc", "fqvit"))):
        parts = {"pyramid": low.pyramid(32, 64), "box": batched(low.boxes[0], 5), "mask": low.masks[0]}
        found |= {f"detector_{name}_{part}": written(program) for part, program in parts.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", action="store_true")
    arguments = parser.parse_args()
    seeds = single_ops() | several_outputs() | wide_ops(3, SMALL, 4)
    if arguments.networks:
        seeds |= {f"large_{name}": data for name, data in wide_ops(25, 2**18, 1).items()} | networks()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds.items():
        (arguments.folder / f"{name}.fqvit").write_bytes(data)
    sys.stdout.write(f"{len(seeds)} programs, {sum(map(len, seeds.values()))} bytes\n")


if __name__ == "__main__":
    main()
