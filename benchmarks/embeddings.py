"""Measure integer embeddings of DINOv2: cosine to float, nearest neighbours, patch tokens; compare with other int8 runtimes.

    .venv/bin/pip install onnx onnxruntime openvino nncf        # only for the peers
    .venv/bin/python benchmarks/embeddings.py --data ../shared/data

DATA has weights/dinov2_vits14.safetensors and imagenet/{calib,val}/CLASS/*.jpg with one image per class. A variant is a recipe
with bits, or a peer (another int8 runtime), calibrated on one of three disjoint subsets of imagenet/calib. The gallery is all
of imagenet/calib, the queries are imagenet/val: the nearest neighbour of a query by cosine decides its class (1-shot, 1,000
classes). Agreement is the share of queries with the class that the float model finds; `difference low` and `difference high`
are the 95 % confidence interval of the paired difference in accuracy.

The results of finished steps are kept in --work (build/embeddings), so that an interrupted run resumes where it stopped. Writes
results/embeddings.csv from every variant that is complete.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from embeddings_peers import PEERS, Peer, run_peer
from numpy.typing import NDArray
from torch.nn import functional as F
from version import ROOT, commit

import fqvit
from fqvit.data.images import ImageFolder
from fqvit.evaluate.pairs import pair
from fqvit.frontend.load import load_model
from fqvit.models.load import FloatModel
from fqvit.models.outputs import output_graph
from fqvit.models.pixels import normalise
from fqvit.quant.calibrate import calibrate
from fqvit.quant.calibration import Calibration
from fqvit.quant.recipe import load_recipe, with_bits
from fqvit.runtime.native import Engine

Images = NDArray[np.uint8]
Floats = NDArray[np.float32]

RESULTS = ROOT / "benchmarks" / "results" / "embeddings.csv"
SUBSETS, SPACING = 3, 7  # subset i: every 7th image, starting with image i
OUTPUTS = "embedding,tokens"
TOKEN_IMAGES = 100  # queries whose patch tokens are compared: 25,600 tokens
PART = 50  # images per saved part
VARIANTS = ("embedding 8/8/4", "embedding 8/8/8", "fqvit 8/8/4", "fqvit 8/8/8", *PEERS)
MODELS = {
    "dinov2": ("dinov2_vits14", "dinov2_vits14.safetensors"),
    "registers": ("dinov2_vits14_reg", "dinov2_vits14_reg4_mri.safetensors"),
}
FIELDS = (
    "model",
    "variant",
    "subset",
    "calibration images",
    "queries",
    "cosine mean",
    "cosine 1 %",
    "cosine least",
    "tokens mean",
    "agreement",
    "float top-1",
    "top-1",
    "difference low",
    "difference high",
    "ms per image",
    "machine",
    "commit",
)


@dataclass(frozen=True)
class Task:
    """What every variant needs. calib, val: images uint8 [n, H, W, C], one per class and in the order of classes"""

    name: str
    model: FloatModel
    calib: Images
    val: Images
    images: int
    work: Path  # embeddings of this run
    kept: Path  # calibrations, programs and galleries, which do not depend on the queries
    classes: NDArray[np.int64]  # class of each query

    def subset(self, number: int) -> Images:
        """Return one of the disjoint subsets of the calibration images."""
        return np.ascontiguousarray(self.calib[number::SPACING][: self.images])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "variants", nargs="*", metavar="VARIANT", help=f"any of {', '.join(VARIANTS)}; quote a name; all by default"
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with weights/ and imagenet/")
    parser.add_argument("--model", choices=MODELS, default="dinov2", help="registers: cosine only")
    parser.add_argument("--subsets", default="0,1,2", help="comma-separated numbers of calibration subsets")
    parser.add_argument("--images", type=int, default=128, help="calibration images per subset, at most 142")
    parser.add_argument("--queries", type=int, default=1000, help="use this many queries, evenly spaced")
    parser.add_argument("--cosine", action="store_true", help="leave out the gallery and nearest neighbours")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "embeddings")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, weights = MODELS[arguments.model]
    model = load_model(name, arguments.data / "weights" / weights, size=224)
    calib, val = (image_arrays(arguments.data, part, model, arguments.work) for part in ("calib", "val"))
    classes = np.arange(arguments.queries) * len(val) // arguments.queries
    val = np.ascontiguousarray(val[classes])
    work = arguments.work / f"{arguments.model}-{len(val)}"
    kept = arguments.work / arguments.model
    for folder in (work, kept):
        folder.mkdir(parents=True, exist_ok=True)
    task = Task(arguments.model, model, calib, val, arguments.images, work, kept, classes)
    gallery = arguments.model == "dinov2" and not arguments.cosine
    exact = _float(task, gallery)
    rows = []
    for variant in arguments.variants or VARIANTS:
        for subset in map(int, arguments.subsets.split(",")):
            row = measure(task, variant, subset, exact, gallery)
            rows.append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items() if key not in ("machine", "commit")), flush=True)
            write(arguments.output, rows)


def measure(task: Task, variant: str, subset: int, exact: dict[str, Floats], gallery: bool) -> dict[str, object]:
    """Calibrate, run and compare one variant; returns a row of the results."""
    label = f"{variant.replace('/', '').replace(' ', '-')}-{subset}-{task.images}"
    if variant in PEERS:
        run: Engine | Peer = run_peer(variant, task.model, task.subset(subset), task.kept / label)
    else:
        run = engine_of(task, variant, subset, label)
    queries, seconds = embed(run, task.val, task.work / f"{label}-queries")
    cosine = cosines(queries["embedding"], exact["queries"])
    row: dict[str, object] = dict.fromkeys(FIELDS, "")
    row |= {"model": task.name, "variant": variant, "subset": subset, "calibration images": task.images}
    row |= {"queries": len(task.val), "cosine mean": round(float(cosine.mean()), 5)}
    row |= {"cosine 1 %": round(float(np.quantile(cosine, 0.01)), 5), "cosine least": round(float(cosine.min()), 5)}
    row["tokens mean"] = round(float(cosines(queries["tokens"], exact["tokens"]).mean()), 5)
    row |= {"ms per image": round(1000 * seconds, 1), "machine": platform.machine(), "commit": commit()}
    if gallery:
        found, _ = embed(run, task.calib, task.kept / f"{label}-gallery")
        ours = neighbours(queries["embedding"], found["embedding"])
        theirs = neighbours(exact["queries"], exact["gallery"])
        difference = pair(theirs == task.classes, ours == task.classes)
        row |= {"agreement": round(100 * float((ours == theirs).mean()), 1)}
        row |= {"float top-1": round(100 * float((theirs == task.classes).mean()), 1)}
        row |= {"top-1": round(100 * float((ours == task.classes).mean()), 1)}
        row |= {"difference low": round(difference.low, 1), "difference high": round(difference.high, 1)}
    return row


def engine_of(task: Task, variant: str, subset: int, label: str) -> Engine:
    """Return the engine of a recipe with bits. Calibration and program are kept as files."""
    path, saved = task.kept / f"{label}.fqvit", task.kept / f"{label}.json"
    if not path.exists():
        name, bits = variant.split()
        if not saved.exists():
            found = calibrate(task.model, [task.subset(subset)], with_bits(load_recipe(name), bits), outputs=OUTPUTS)
            saved.write_text(found.to_json())
        fqvit.lower(task.model, Calibration.from_json(saved.read_text())).save(path)
    return Engine(path, threads=1)


def embed(run: Engine | Peer, images: Images, folder: Path) -> tuple[dict[str, Floats], float]:
    """Return the embeddings of all images, the patch tokens of the first TOKEN_IMAGES, and seconds per image."""
    folder.mkdir(exist_ok=True)
    parts = []
    for first in range(0, len(images), PART):
        path, batch = folder / f"{first}.npz", images[first : first + PART]
        if not path.exists():
            found, seconds = [], []
            for image in batch:
                start = time.process_time()
                values = _values(run, image[None])
                seconds.append(time.process_time() - start)
                found.append(values if first < TOKEN_IMAGES else values[:1])
            named = zip(("embedding", "tokens"), zip(*found, strict=True), strict=False)
            _save(path, {"seconds": np.array(seconds), **{key: np.concatenate(part) for key, part in named}})
        with np.load(path) as saved:
            parts.append({key: saved[key][: len(batch)] for key in saved.files})
    seconds = float(np.median(np.concatenate([part["seconds"] for part in parts])))
    names = ("embedding", "tokens")
    return {key: np.concatenate([part[key] for part in parts if key in part]) for key in names}, seconds


def _values(run: Engine | Peer, images: Images) -> list[Floats]:
    """Return the embeddings [N, C] and the patch tokens [N, T, C] as real numbers."""
    if isinstance(run, Peer):
        return run(images)
    described = zip(run.run_all(images), run.outputs, strict=True)
    return [((codes.astype(np.float32) - info.zero) * info.scale).astype(np.float32) for codes, info in described]


def _float(task: Task, gallery: bool) -> dict[str, Floats]:
    """Run the float model: embeddings of queries and gallery, and patch tokens of the first queries."""
    p = task.model.preprocess
    graph = output_graph(task.model.module, (p.channels, p.height, p.width), outputs=tuple(OUTPUTS.split(",")))

    class Exact(Peer):
        def __call__(self, images: Images) -> list[Floats]:
            with torch.no_grad():
                return [value.numpy() for value in graph.run_all(normalise(images, p))]

    queries, _ = embed(Exact(), task.val, task.work / "float-queries")
    found = {"queries": queries["embedding"], "tokens": queries["tokens"]}
    if gallery:
        found["gallery"] = embed(Exact(), task.calib, task.kept / "float-gallery")[0]["embedding"]
    return found


def cosines(a: Floats, b: Floats) -> NDArray[np.float64]:
    """Return the cosine of each vector of `a` and the corresponding vector of `b`, over the last axis."""
    return F.cosine_similarity(torch.from_numpy(a).double(), torch.from_numpy(b).double(), dim=-1).numpy()


def neighbours(queries: Floats, gallery: Floats) -> NDArray[np.int64]:
    """Return the index of the gallery's vector with the largest cosine to each query."""
    normal = [F.normalize(torch.from_numpy(part).double(), dim=-1) for part in (queries, gallery)]
    return (normal[0] @ normal[1].T).argmax(1).numpy()


def image_arrays(data: Path, part: str, model: FloatModel, work: Path) -> Images:
    """Return all images of a part, preprocessed, in the order of their paths."""
    path = work / f"{part}.npy"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        source = ImageFolder.unlabelled(data / "imagenet" / part, model.preprocess)
        temporary = path.with_suffix(".part.npy")
        np.save(temporary, np.stack([source.read(i) for i in range(len(source))]))
        temporary.rename(path)
    return np.load(path, mmap_mode="c")


def _save(path: Path, arrays: dict[str, NDArray[np.generic]]) -> None:
    temporary = path.with_suffix(".part.npz")
    np.savez(temporary, **arrays)
    temporary.rename(path)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Replace the rows of the same model, variant and subset, and keep all others."""
    kept = []
    if path.exists():
        with path.open(newline="") as file:
            kept = list(csv.DictReader(file))

    def key(row: dict[str, object]) -> tuple[str, ...]:
        return str(row["model"]), str(row["variant"]), str(row["subset"])

    new = {key(row) for row in rows}
    every = sorted([row for row in kept if key(row) not in new] + rows, key=key)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(every)


if __name__ == "__main__":
    sys.exit(main())
