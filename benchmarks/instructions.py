"""Count the AArch64 instructions that the engine executes per image, by kernel, in QEMU.

    cmake -S native -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DFQVIT_BUILD_SHARED=OFF \\
        -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static
    cmake --build build/aarch64
    .venv/bin/python benchmarks/instructions.py build/aarch64/fqvit-run build/speed/deit_tiny.fqvit.fqvit
    .venv/bin/python benchmarks/instructions.py build/aarch64/fqvit-run MODEL.fqvit --cpu cortex-a76 --functions

Runs fqvit-run with one and with several repetitions of the same image; the difference is the work per image, without loading.
A plugin (instructions.c) counts how often each block of instructions runs, and the symbols of fqvit-run tell to which kernel
the block belongs. Needs Debian's packages qemu-user and binutils-aarch64-linux-gnu. benchmarks/speed.py creates programs in
build/speed.
"""

from __future__ import annotations

import argparse
import bisect
import json
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import fqvit
from fqvit.bench.measure import bench_images

ROOT = Path(__file__).resolve().parent.parent
# A function belongs to the first group whose pattern is found in its name.
GROUPS = {
    "attention": r"ttention|oftmax|MatMul|WeightedSum|for_each_token|exponentials|multiply_row\(|look_up_(weights|sum)|Codes::",
    "products": r"multiply_tile|Packed\w*::multiply|pack_rows",
    "LayerNorm": r"layernorm|LayerNorm",
    "epilogues": r"epilogue|store_(bytes|words|i32)|look_up_(each|shared)|add_(residual|bias)",
    "elementwise": r"\b(multiply|rotary|depthwise|max|mean)\w*\(|add_taps",
    "blocking of products": r"Linear::",
}
DOTS = re.compile(r"[su]dot|us?dot|[su]mmla|usmmla")


class Listing:
    """The functions of a program and the mnemonic of each instruction, from nm and objdump."""

    def __init__(self, program: Path, binutils: str) -> None:
        symbols = subprocess.run([f"{binutils}nm", "-C", "-n", str(program)], capture_output=True, text=True, check=True).stdout
        found = re.findall(r"^([0-9a-f]+) [tTwW] (.*)$", symbols, re.MULTILINE)
        named = [(int(address, 16), name) for address, name in found if not name.startswith("$")]
        self.addresses, self.names = [address for address, _ in named], [name for _, name in named]
        code = subprocess.run(
            [f"{binutils}objdump", "-d", "--no-show-raw-insn", str(program)], capture_output=True, text=True, check=True
        ).stdout
        self.mnemonics = {int(at, 16): name for at, name in re.findall(r"^ +([0-9a-f]+):\t(\S+)", code, re.MULTILINE)}

    def function(self, address: int) -> str:
        place = bisect.bisect_right(self.addresses, address) - 1
        return self.names[place] if place >= 0 else "?"


def group(function: str) -> str:
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, function)), "other")


def blocks(arguments: argparse.Namespace, plugin: Path, image: Path, repeat: int, folder: Path) -> Counter[tuple[int, int]]:
    """Return how often each block ran, by its address and number of instructions."""
    to = folder / "blocks.txt"
    command = [arguments.qemu, "-cpu", arguments.cpu, "-plugin", f"{plugin},to={to}", str(arguments.run), str(arguments.model)]
    command += [str(image), "--repeat", str(repeat), *(["--isa", arguments.isa] if arguments.isa else [])]
    subprocess.run(command, check=True, capture_output=True)
    found: Counter[tuple[int, int]] = Counter()
    for line in to.read_text().splitlines():
        address, instructions, runs = line.split()
        found[int(address, 16), int(instructions)] += int(runs)
    return found


def count(arguments: argparse.Namespace, folder: Path) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return the instructions per image: by group, by function, and, for dot and matrix product instructions, by mnemonic."""
    plugin, image = folder / "instructions.so", folder / "image.ppm"
    source = ROOT / "benchmarks" / "instructions.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(plugin)], check=True)
    pixels = bench_images(fqvit.Program.load(arguments.model).header, 1)[0]
    height, width, channels = pixels.shape
    image.write_bytes(f"P{6 if channels == 3 else 5} {width} {height} 255\n".encode() + pixels.tobytes())
    total = blocks(arguments, plugin, image, 1 + arguments.images, folder)
    total.subtract(blocks(arguments, plugin, image, 1, folder))
    listing = Listing(arguments.run, arguments.binutils)
    groups: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    dots: Counter[str] = Counter()
    for (address, instructions), runs in total.items():
        function = listing.function(address)
        functions[function] += instructions * runs
        groups[group(function)] += instructions * runs
        for at in range(address, address + 4 * instructions, 4):
            if DOTS.fullmatch(name := listing.mnemonics.get(at, "")):
                dots[name] += runs
    for counter in (groups, functions, dots):
        for key in counter:
            counter[key] = round(counter[key] / arguments.images)
    return groups, functions, dots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="fqvit-run for AArch64, linked statically, with symbols")
    parser.add_argument("model", type=Path, help=".fqvit file")
    parser.add_argument("--isa", default="", help="instruction set, as for fqvit-run (default: the fastest)")
    parser.add_argument("--cpu", default="max", help="CPU that QEMU emulates, such as cortex-a76 (default: max)")
    parser.add_argument("--images", type=int, default=2, help="repetitions to average (default: 2)")
    parser.add_argument("--functions", action="store_true", help="also list the 25 functions with the most instructions")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--qemu", default="qemu-aarch64")
    parser.add_argument("--binutils", default="aarch64-linux-gnu-", help="prefix of nm and objdump")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fqvit-instructions-") as name:
        groups, functions, dots = count(arguments, Path(name))
    if arguments.json:
        print(json.dumps({"total": sum(groups.values()), "groups": groups, "dots": dots}, indent=1))
        return
    for title, counter in (("", groups), ("of these ", dots)):
        for key, instructions in counter.most_common():
            print(f"{title + key:24} {instructions / 1e6:9.2f} million")
    print(f"{'total':24} {sum(groups.values()) / 1e6:9.2f} million instructions per image")
    if arguments.functions:
        for key, instructions in functions.most_common(25):
            print(f"{instructions / 1e6:9.2f} {key[:150]}")


if __name__ == "__main__":
    main()
