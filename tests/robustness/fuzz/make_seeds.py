"""Write small valid files for each fuzz target of readers.py: the seeds of the fuzzers.

The seeds are committed, compressed with gzip if that makes them at least 30 % smaller.

python tests/robustness/fuzz/make_seeds.py tests/robustness/fuzz/seeds
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save as serialize

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from fqvit.detect.calibrate import calibrate_detector  # noqa: E402
from fqvit.detect.lower import LoweredDetector  # noqa: E402
from fqvit.detect.masks import to_runs  # noqa: E402
from fqvit.detect.model.load import load_detector, random_release  # noqa: E402
from fqvit.detect.program import DetectorProgram  # noqa: E402
from fqvit.inference.embeddings import Embeddings, Info, write  # noqa: E402
from fqvit.inference.formats import DTYPES  # noqa: E402
from fqvit.ir.program import Program  # noqa: E402
from fqvit.lowering.lower import lower  # noqa: E402
from fqvit.models.config import DetectorConfig, SwinConfig, ViTConfig  # noqa: E402
from fqvit.quant.recipe import load_recipe  # noqa: E402
from tests.detect.detectors import SETTINGS  # noqa: E402
from tests.detect.test_programs import sample_images  # noqa: E402
from tests.factories import calibration_of, model_of  # noqa: E402
from tests.ir.draw import STYLES, Draw  # noqa: E402
from tests.ir.test_ops import CASES  # noqa: E402
from tests.runtime.programs import program_with  # noqa: E402
from tests.runtime.wide import accepted  # noqa: E402
from tests.runtime.wide_moves import EVERY_WIDE  # noqa: E402

SWIN = SwinConfig((64, 64), 4, 3, 0, 4, (1, 1, 1, 1), (1, 1, 2, 2), 3, fixed_window=True)
TINY = DetectorConfig(SWIN, 2, channels=4, box_channels=4, box_width=6, mask_convs=1, mask_channels=4)


MASK = np.zeros((8, 9), np.bool_)
MASK[2:5, 3:6] = True
LETTERS = to_runs(MASK)  # COCO's compressed RLE (run-length encoding)


def written(program: Program | DetectorProgram) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.fqvit"
        program.save(path)
        return path.read_bytes()


def programs() -> dict[str, bytes]:
    """Make two small programs for every op and for every group of ops that the engine fuses. Whole networks are in golden/."""
    kinds = {case.__name__.lower(): lambda draw, case=case: (CASES[case](draw),) for case in CASES} | EVERY_WIDE
    found = {}
    for kind, case in kinds.items():
        files = []
        for seed in range(60):
            draw = Draw(np.random.default_rng(seed), STYLES[seed % 4])
            ops = case(draw)
            if accepted(draw, ops) and sum(x.nbytes for x in draw.buffers.values()) < 4000:
                files.append(written(program_with(draw, *ops)[0]))
        name = kind.replace(" ", "_").replace(",", "").replace("+", "and")
        found |= {f"{name}_{i}.fqvit": raw for i, raw in enumerate(sorted(files, key=len)[:2])}
    return found | {"outputs.fqvit": written(named_outputs())}


def named_outputs() -> Program:
    """Make a tiny ViT with named outputs of every kind."""
    model = model_of(ViTConfig((6, 6), 3, 1, 3, 8, 1, 2, 8), "outputs", 11, None)
    outputs = ("logits", "embedding:u16:l2", "class@0:sign", "tokens@0:u8", "mean")
    return lower(model, calibration_of(model, "fq-vit", outputs=outputs))


def detectors() -> dict[str, bytes]:
    settings = msgspec.structs.replace(SETTINGS, short=32, long=64, proposals_a_level=20, proposals=10)
    detector = load_detector(random_release(TINY, "mmdetection"), settings)
    calibration = calibrate_detector(detector, sample_images()[:1], load_recipe("fqvit"))
    return {"tiny.fqvit": written(DetectorProgram.of(detector, LoweredDetector(detector, calibration)))}


def zeros() -> dict[str, torch.Tensor]:
    """Make weights of a detector that are all 0 and compress to almost nothing."""
    return {name: torch.zeros_like(x) for name, x in random_release(TINY, "mmdetection").items()}


def saved(write: Callable[[Path], object], name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def safetensors_files() -> dict[str, bytes]:
    few = {"blocks.0.attn.qkv.weight": torch.zeros(6, 2), "head.weight": torch.zeros(10, 2), "cls_token": torch.zeros(1, 1, 2)}
    metadata = {"fqvit.detector": json.dumps({"short": 32, "long": 64})}
    return {"few.safetensors": serialize(few), "detector.safetensors": serialize(zeros(), metadata)}


def embedding_files() -> dict[str, bytes]:
    infos = (
        Info("embedding", "embedding", 0.5, 7, "u8", (6,)),
        Info("tokens@9", "tokens", 0.25, 300, "u16", (3, 4), (0, 1, 2, 3)),
        Info("logits", "logits", 0.125, 0, "i32", (5,)),
    )
    found = {}
    for name, chosen in (("one", infos[:1]), ("three", infos)):
        vectors = {
            info.name: np.arange(2 * np.prod(info.shape)).reshape(2, *info.shape).astype(DTYPES[info.dtype]) for info in chosen
        }
        some = Embeddings(["a.jpg", "b/ä.png"], vectors, {info.name: info for info in chosen}, "vit", "0" * 64)
        found[f"{name}.safetensors"] = saved(lambda path, some=some: write(path, some), "x.safetensors")
    return found


def torch_files() -> dict[str, bytes]:
    few = {"model": {"module.head.weight": torch.zeros(3, 2), "module.norm.weight": torch.ones(2).half()}, "epoch": 3}
    whole, old = {"state_dict": zeros()}, {"head.weight": torch.arange(6.0).reshape(2, 3).t()}
    return {
        "few.pth": saved(lambda path: torch.save(few, path), "x.pth"),
        "detector.pth": saved(lambda path: torch.save(whole, path), "x.pth"),
        "legacy.pth": saved(lambda path: torch.save(old, path, _use_new_zipfile_serialization=False), "x.pth"),
    }


def npz_files() -> dict[str, bytes]:
    arrays = {"Transformer/encoder_norm/bias": np.zeros(4, np.float32), "head/kernel": np.zeros((4, 3), np.float16)}
    return {
        "few.npz": saved(lambda path: np.savez(path, **arrays), "x.npz"),
        "packed.npz": saved(lambda path: np.savez_compressed(path, **arrays), "x.npz"),
    }


def image_bytes(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, kind, **options)
    return out.getvalue()


def images() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    found = {f"rgb.{kind}": image_bytes(kind) for kind in ("png", "jpeg", "bmp", "gif", "tiff", "webp")}
    found |= {"turned.jpeg": image_bytes("jpeg", exif=exif), "packed.tiff": image_bytes("tiff", compression="tiff_lzw")}
    found |= {"palette.png": image_bytes("png", "P"), "bits.tiff": image_bytes("tiff", "1")}
    return found | {"alpha.webp": image_bytes("webp", "RGBA")}


def annotations() -> dict[str, bytes]:
    box = {"id": 1, "image_id": 1, "category_id": 2, "bbox": [1, 1, 4, 3], "area": 12.0, "iscrowd": 0}
    shapes = {"polygon": [[1, 1, 5, 1, 5, 4, 1, 4]], "runs": {"size": [8, 9], "counts": [9, 3, 5, 3, 52]}}
    shapes |= {"letters": LETTERS, "none": None}
    image, category = {"id": 1, "file_name": "a.png", "height": 8, "width": 9}, {"id": 2, "name": "cat"}
    return {
        f"{name}.json": json.dumps(
            {"images": [image], "annotations": [{**box, "segmentation": shape}], "categories": [category]}
        ).encode()
        for name, shape in shapes.items()
    }


def results() -> dict[str, bytes]:
    row = {"image_id": 1, "category_id": 2, "bbox": [1, 1, 4, 3], "score": 0.5, "file_name": "a.png", "segmentation": LETTERS}
    return {"one.json": json.dumps([row]).encode(), "two.json": json.dumps([row, {**row, "category": "cat"}]).encode()}


def recipes() -> dict[str, bytes]:
    text = """base = "fq-vit"
weight_bits = 4
weight_group = 16
[sites.patch]
bits = 8
[sites."blocks.*.mlp"]
observer = "percentile"
"""
    return {"mine.toml": text.encode(), "small.toml": b"activation_bits = 6\n"}


def settings() -> dict[str, bytes]:
    text = 'short = 480\nmean = [0.5, 0.5, 0.5]\nstrides = [4, 8, 16, 32, 64]\nclasses = ["a", "b"]\ncategories = [1, 7]\n'
    return {"mine.toml": text.encode(), "stds.toml": b"stds = [[0.1, 0.1, 0.2, 0.2]]\nscore = 0.1\n"}


def class_names() -> dict[str, bytes]:
    return {"lines.txt": b"cat\ndog\n", "pairs.txt": b'[["n01", "cat"], ["n02", "dog"]]', "names.txt": b'["cat", "dog"]'}


def shards() -> dict[str, bytes]:
    members = {"0/a.png": image_bytes("png"), "1/" + "b" * 120 + ".png": image_bytes("png")}
    labels = {"a.png": image_bytes("png"), "a.cls": b"3", "b.jpg": image_bytes("jpeg", quality=30), "b.json": b'{"label": 1}'}
    found = {}
    for name, files, kind in (("folders", members, tarfile.PAX_FORMAT), ("labels", labels, tarfile.GNU_FORMAT)):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
            for member, data in files.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        found[f"{name}.tar"] = out.getvalue()[:-8192] if not any(out.getvalue()[-9216:]) else out.getvalue()
    return found


TARGETS = {
    "program": programs,
    "detector": detectors,
    "safetensors": safetensors_files,
    "embeddings": embedding_files,
    "torch": torch_files,
    "npz": npz_files,
    "image": images,
    "coco": annotations,
    "results": results,
    "recipe": recipes,
    "settings": settings,
    "classes": class_names,
    "shard": shards,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("targets", nargs="*", default=[])
    arguments = parser.parse_args()
    for target in arguments.targets or TARGETS:
        folder = arguments.folder / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, raw in TARGETS[target]().items():
            small = gzip.compress(raw, 9, mtime=0)
            packs = len(small) < 0.7 * len(raw)
            stored = small if packs else raw
            (folder / (f"{name}.gz" if packs else name)).write_bytes(stored)
            print(f"{target}/{name}: {len(raw)} bytes, {len(stored)} stored")


if __name__ == "__main__":
    main()
