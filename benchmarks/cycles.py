"""Estimate the cycles of the inner loops of the NEON kernels with llvm-mca, for CPUs that are not available.

    .venv/bin/python benchmarks/cycles.py                        # Cortex-A76 and Neoverse N1
    .venv/bin/python benchmarks/cycles.py --cpus neoverse-n2     # other CPUs that llvm-mca knows

Compiles the kernels with the cross compiler, takes the longest loop of each function below and simulates 200 iterations. The
simulation assumes a perfect cache, so these are lower bounds. LLVM 19 has a scheduling model of Neoverse N1, which has the same
pipelines as Cortex-A76; for cortex-a76 itself, LLVM uses the scheduling model of the older Cortex-A57. Needs Debian's packages
g++-aarch64-linux-gnu and llvm-19.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent / "native"
CPUS = "cortex-a76,neoverse-n1"
ITERATIONS = 200
# Title: (file, regular expression for the function's name, multiply-accumulates or elements per iteration, unit of this count).
LOOPS = {
    "product, sdot, 6 x 16": ("gemm_neon_dotprod", r"multiply_tile<6>", 6 * 16 * 8, "MAC"),
    "product, usmmla, 6 x 16": ("gemm_neon_i8mm", r"multiply_tile<6>", 6 * 16 * 8, "MAC"),
    "product, ARMv8.0, 6 x 16": ("gemm_neon", r"multiply_tile<6>", 6 * 16 * 8, "MAC"),
    "attention, udot, 4 x 16": ("gemm_neon_dotprod", r"attention_tile<4>", 4 * 16 * 16, "MAC"),
    "softmax weights, 128 distances": ("attention_neon", r"look_up_weights<2>", 16, "score"),
    "requantization to u8": ("kernels_neon", r"store_bytes_16<.*HighHalf>", 16, "code"),
    "GELU, tables per channel": ("kernels_neon", r"look_up_each<.*HighHalf, unsigned char>", 8, "code"),
    "residual sum, u16": ("kernels_neon", r"add_residual<\(fqvit::Residual::Type\)1, true>", 8, "code"),
    "LayerNorm, u16 to u8": ("layernorm_neon", r"layernorm_rows<true, true, false>", 8, "code"),
}


def functions(listing: str) -> dict[str, list[tuple[int, str]]]:
    """Return the instructions of each function with their addresses."""
    found = {}
    for name, body in re.findall(r"^[0-9a-f]+ <([^\n]*)>:\n(.*?)(?:\n\n|\Z)", listing, re.MULTILINE | re.DOTALL):
        found[name] = [(int(at, 16), text) for at, text in re.findall(r"^ +([0-9a-f]+):\t(.*)$", body, re.MULTILINE)]
    return found


def longest_loop(code: list[tuple[int, str]]) -> list[str]:
    """Return the instructions of the longest loop that contains no other loop."""
    loops: list[tuple[int, int]] = []
    for at, text in code:
        jump = re.match(r"(?:b\.\w+|cbn?z\t\w+,|tbn?z\t\w+, #\d+,)\s*([0-9a-f]+) ", text)
        if jump and int(jump.group(1), 16) <= at:
            loops.append((int(jump.group(1), 16), at))
    inner = [loop for loop in loops if not any(loop != o and loop[0] <= o[0] and o[1] <= loop[1] for o in loops)]
    begin, end = max(inner, key=lambda loop: loop[1] - loop[0])
    return [re.sub(r" *(//|<).*", "", text) for at, text in code if begin <= at <= end]


def cycles(loop: list[str], cpu: str, tool: str) -> float:
    """Return the cycles per iteration."""
    # Replace the addresses of jump targets by a label, because llvm-mca assembles the text.
    lines = [re.sub(r"\b(b(?:\.\w+)?\t|cbn?z\t\w+, |tbn?z\t\w+, #\d+, )[0-9a-f]+", r"\1loop", text) for text in loop]
    command = [tool, "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+dotprod,+i8mm", f"-iterations={ITERATIONS}"]
    source = "loop:\n" + "\n".join(lines) + "\n"
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"cycles.py: llvm-mca: {done.stderr.strip()}")
    found = re.search(r"Total Cycles: +(\d+)", done.stdout)
    assert found
    return int(found.group(1)) / ITERATIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", default=CPUS, help=f"comma-separated CPU names that llvm-mca knows (default: {CPUS})")
    parser.add_argument("--llvm-mca", default="llvm-mca-19", help="the command (default: llvm-mca-19)")
    arguments = parser.parse_args()
    cpus = arguments.cpus.split(",")
    print(f"{'loop':32} {'instructions':>12}" + "".join(f" {cpu + ', cycles':>22}" for cpu in cpus) + "  per cycle")
    with tempfile.TemporaryDirectory(prefix="fqvit-cycles-") as folder:
        for title, (file, pattern, count, unit) in LOOPS.items():
            made = Path(folder) / f"{file}.o"
            flags = ("-std=c++20", "-O3", "-I", str(NATIVE), "-c", str(NATIVE / "kernels" / "neon" / f"{file}.cpp"))
            subprocess.run(["aarch64-linux-gnu-g++", *flags, "-o", str(made)], check=True)
            command = ["aarch64-linux-gnu-objdump", "-dC", "--no-show-raw-insn", str(made)]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            loop = longest_loop(next(code for name, code in functions(listing).items() if re.search(pattern, name)))
            times = [cycles(loop, cpu, arguments.llvm_mca) for cpu in cpus]
            rates = ", ".join(f"{count / time:.1f}" for time in times)
            print(f"{title:32} {len(loop):12}" + "".join(f" {time:22.1f}" for time in times) + f"  {rates} {unit}")


if __name__ == "__main__":
    main()
