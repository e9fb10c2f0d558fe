"""Compare the time and memory of the engine with those of other runtimes for several models, as CSV.

A model uses its real weights if they are in --data-root. Otherwise its weights are normally distributed and clipped at 3 sigma
like real checkpoints, because the speed of AVX2 matrix products depends on how well the weights can be packed. The programs of
recipes fqvit and fq-vit run in the same rounds; ratios are relative to the first recipe. Needs the packages onnx, onnxruntime,
openvino and nncf; the models of timm (speed_models.py) need timm.

    .venv/bin/pip install onnx onnxruntime openvino nncf timm
    .venv/bin/python benchmarks/speed.py                                # the committed table: one thread, batches 1 and 8
    .venv/bin/python benchmarks/speed.py --isa avx2                     # the same without AVX-512, on a CPU that has it
    .venv/bin/python benchmarks/speed.py --models deit_tiny,deit_small --settings 1x8,2x8 --against none
    .venv/bin/python benchmarks/speed.py --models vit_tiny_384,vit_small_384 --settings 1x1
    .venv/bin/python benchmarks/speed.py --models families --settings 1x1 --recipes fqvit --against onnxruntime,openvino
    .venv/bin/python benchmarks/speed.py --models deit_tiny --settings 1x1 --rounds 5 --dry  # DeiT-Tiny in a few minutes
    .venv/bin/python benchmarks/speed.py --quick                        # what `make bench` runs; does not write the CSV file

--isa avx2 sets the environment variables that limit the instruction set of this project (FQVIT_ISA), of OpenVINO
(ONEDNN_MAX_CPU_ISA) and of PyTorch. ONNX Runtime has no such setting and is left out. Generated checkpoints and programs are
kept in build/speed. Delete this folder after changing a recipe.
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path

from speed_models import TIMM, prepare
from version import commit

import fqvit
from fqvit.bench import report
from fqvit.bench.measure import Measured, measure
from fqvit.bench.peers import LIBRARIES, parse
from fqvit.cli.commands.bench import numbers
from fqvit.models.device import keep_freed_memory
from fqvit.system.progress import track

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "speed.csv"
FIELDS = (
    "model",
    "weights",
    "batch",
    "threads",
    "peer",
    "CPU ms",
    "CPU ms least",
    "wall ms",
    "wall ms least",
    "peak MB",
    "load s",
    "ratio",
    "exact",
    "rounds",
    "version or kernels",
    "cpu",
    "has",
    "commit",
    "instruction set",
    "share of peak",
)
TABLE = ("deit_tiny", "deit_small", "vit_base", "swin_tiny")
RECIPES = ("fqvit", "fq-vit")
# Environment variables that limit the instruction sets of this project and of the peers.
LIMITS = {
    "avx2": {
        "FQVIT_ISA": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}


def append(name: str, kind: str, recipes: tuple[str, ...], rounds: int, found: Measured) -> None:
    """Append the rows of one model. The instruction set is that of the engine; --isa limits the peers to the same one."""
    machine, fresh = report.machine(), not RESULTS.is_file()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file)
        if fresh:
            writer.writerow(FIELDS)
        for timings in found.timings:
            for row in report.rows(timings, found):
                note = found.notes[row.name]
                ours = row.name in recipes
                times = (row.cpu_median, row.cpu_min, row.wall_median, row.wall_min)
                writer.writerow(
                    (
                        name,
                        kind,
                        row.batch,
                        row.threads,
                        f"recipe {row.name}" if ours else row.name,
                        *(f"{value:.2f}" for value in times),
                        "" if row.peak_mb is None else f"{row.peak_mb:.0f}",
                        f"{row.load_s:.2f}",
                        f"{row.ratio:.3f}",
                        {True: "yes", False: "no", None: ""}[note.exact],
                        rounds,
                        note.text.split(",")[0],
                        machine["cpu"],
                        " ".join(machine["has"]),  # type: ignore[arg-type]
                        commit(),
                        "" if found.peak is None else found.peak.isa,
                        "" if row.peak_share is None else f"{row.peak_share:.3f}",
                    )
                )


def setting(words: str) -> tuple[int, int]:
    """Parse a setting: 1x8 is one thread and batch 8."""
    threads, _, batch = words.partition("x")
    return numbers("--threads", threads)[0], numbers("--batch", batch)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TABLE), help="comma-separated model names; families: all models of timm")
    parser.add_argument("--settings", default="1x1,1x8", help="comma-separated THREADSxBATCH: 1x1,1x8,2x8")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="comma-separated; ratios are relative to the first")
    parser.add_argument("--against", default=",".join(LIBRARIES), help="comma-separated runtimes to compare with, or none")
    parser.add_argument("--isa", choices=LIMITS, help="limit this project and the other runtimes to an older instruction set")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--data-root",
        type=Path,
        default=ROOT.parent / "shared" / "data",
        help="folder with weights/NAME.safetensors and imagenet/calib; default: %(default)s",
    )
    parser.add_argument("--dry", action="store_true", help="print only, do not write the CSV file")
    parser.add_argument(
        "--quick", action="store_true", help="DeiT-Tiny, recipe fqvit, one thread, batch 1, five rounds; implies --dry"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.settings, arguments.recipes = "deit_tiny", "1x1", "fqvit"
        arguments.rounds, arguments.dry = 5, True
    libraries = parse(arguments.against)
    if arguments.isa is not None:
        os.environ.update(LIMITS[arguments.isa])
        libraries = tuple(library for library in libraries if library != "onnxruntime")
    keep_freed_memory()
    folder = ROOT / "build" / "speed"
    folder.mkdir(parents=True, exist_ok=True)
    settings = [setting(words) for words in arguments.settings.split(",")]
    recipes = tuple(arguments.recipes.split(","))
    for name in TIMM if arguments.models == "families" else arguments.models.split(","):
        model = prepare(name, recipes, arguments.data_root, folder)
        found = measure(model.programs, libraries, str(model.weights), settings, arguments.rounds, track)
        print(f"\n{model.name}, weights: {model.kind}\n\n{report.text(found)}", *found.warnings, sep="\n", flush=True)
        if not arguments.dry:
            append(model.name, model.kind, recipes, arguments.rounds, found)


if __name__ == "__main__":
    try:
        main()
    except fqvit.FqvitError as error:
        raise SystemExit(f"speed.py: {error}") from None
