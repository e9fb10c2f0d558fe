"""Convert one float model into the files that the peers run: PyTorch, ONNX Runtime and OpenVINO.

Run as `python -m fqvit.bench.prepare`: it reads one line of JSON from stdin and writes one line of JSON to stdout.
This is a separate process because it loads torch and all peers, which must not count as memory of a worker. If one peer fails,
the others are still prepared.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fqvit.errors import FqvitError

if TYPE_CHECKING:
    from fqvit.models.architectures import Architecture
    from fqvit.models.load import FloatModel

Floats = NDArray[np.float32]
OPSET = 20  # has Gelu and LayerNormalization as single ops


class CannotRebuild(FqvitError):
    """Raised if there are neither weights nor a name from which the float model of a program can be rebuilt."""


def float_model(
    name: str,
    weights: str | None,
    image: list[int],
    patch: int,
    classes: int | None,
    source: str = "",
    settings: Mapping[str, Any] | None = None,
) -> FloatModel:
    """Return the float model of a program, with the given weights or with random ones of the same shapes.

    Its module is the original one, not a captured graph.
    source: the field `source` of the program's header   settings: arguments of load_model
    """
    from fqvit.models import architectures, embedded, zoo
    from fqvit.models.load import FloatModel, build, load_for_program

    height, width, channels = image
    row = zoo.lookup(name)
    if weights is None and row is None:
        return _random_family(architectures.lookup(name), name, (height, width), classes)
    if weights is None and row is not None:
        outputs = classes or row.config.classes
        sizes = replace(row.config, image=(height, width), channels=channels, patch=patch, classes=outputs)
        if not (name in embedded.MODELS and sizes == row.config):
            return FloatModel(name, build(sizes).eval(), row.preprocess, None, "random weights")
    model = load_for_program(name, weights, source, (height, width), **(settings or {}))
    p = model.preprocess
    if [p.height, p.width, p.channels] != image:
        shown = "x".join(map(str, image))
        raise FqvitError(f"{weights}: takes images of {p.height}x{p.width}x{p.channels}, expected {shown} as in the program.")
    return model


def _random_family(known: Architecture | None, name: str, image: tuple[int, int], classes: int | None) -> FloatModel:
    """Return a model of models/families/ with random weights. Raises CannotRebuild if no such model has this name."""
    from fqvit.models.config import SwinConfig
    from fqvit.models.families.build import build_family
    from fqvit.models.load import FloatModel
    from fqvit.models.transform import Transform, to_preprocess

    if known is None or isinstance(known.config, SwinConfig):
        raise CannotRebuild(f"the float model of {name} cannot be rebuilt from its name. Pass a checkpoint (--weights FILE).")
    config = replace(known.config, image=image, outputs=classes or 0)
    preprocess, _ = to_preprocess(Transform(), image, config.channels, name)
    return FloatModel(name, build_family(config).eval(), preprocess, None, "random weights")


def onnx_weights(file: Path) -> int:
    """Return the number of weights of the matrix products and convolutions in an ONNX file."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    return sum(int(np.prod(value.dims)) for value in model.graph.initializer if len(value.dims) in (2, 4))


def save_torch(model: FloatModel, folder: Path) -> Path:
    """Save the configuration and the weights for eager.py."""
    import torch

    path = folder / "model.pt"
    config: Any = model.module.config
    torch.save({"kind": type(config).__name__, "config": asdict(config), "state": model.module.state_dict()}, path)
    return path


def export(model: FloatModel, folder: Path) -> Path:
    """Export to ONNX with a dynamic batch axis, by tracing: runtimes fuse the graphs of this exporter best."""
    import torch

    path, p = folder / "model.onnx", model.preprocess
    images = torch.zeros(1, p.channels, p.height, p.width)
    names, open_axes = {"input_names": ["images"], "output_names": ["logits"]}, {0: "batch"}
    torch.onnx.export(
        model.module,
        (images,),
        path,
        opset_version=OPSET,
        dynamo=False,
        dynamic_axes={"images": open_axes, "logits": open_axes},
        **names,  # type: ignore[arg-type]
    )
    return path


def quantize(onnx_file: Path, out: Path, images: Floats, weights: str) -> Path:
    """Quantize with quantize_static of ONNX Runtime, in QDQ format (QuantizeLinear and DequantizeLinear nodes).

    Weights are per-channel (s8 or u8), activations are u8, ranges are min-max.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Images(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(images)

        def get_next(self) -> dict[str, Floats] | None:
            image = next(self.left, None)
            return None if image is None else {"images": image[None]}

    ready = onnx_file.with_suffix(".ready.onnx")
    if not ready.exists():
        quant_pre_process(onnx_file, ready, skip_symbolic_shape=True)
    quantize_static(
        ready,
        out,
        Images(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8 if weights == "s8" else QuantType.QUInt8,
    )
    return out


def quantize_openvino(onnx_file: Path, out: Path, images: Floats) -> Path:
    import nncf
    import openvino as ov

    model = ov.Core().read_model(onnx_file)
    dataset = nncf.Dataset([image[None] for image in images])
    quantized = nncf.quantize(model, dataset, subset_size=len(images), model_type=nncf.ModelType.TRANSFORMER)
    ov.save_model(quantized, out, compress_to_fp16=False)
    return out


def probe(weights: str) -> bytes:
    """Return a QDQ model with all scales 1 that sums 64 products of its input and the largest weight code.

    On inputs of 255, an exact runtime returns EXPECTED_PRODUCT; a runtime with 16-bit intermediate sums saturates.
    """
    from onnx import TensorProto, helper, numpy_helper

    kind = KINDS[weights]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "one", "x zero"], ["x codes"]),
        helper.make_node("DequantizeLinear", ["x codes", "one", "x zero"], ["x values"]),
        helper.make_node("DequantizeLinear", ["w", "one", "w zero"], ["w values"]),
        helper.make_node("MatMul", ["x values", "w values"], ["y"]),
    ]
    constants = {
        "one": np.float32(1),
        "x zero": np.uint8(0),
        "w zero": kind(0),
        "w": np.full((PROBE, PROBE), np.iinfo(kind).max, kind),
    }
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, [PROBE, PROBE])] for name in "xy")
    initial = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "probe", inputs, outputs, initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    return bytes(model.SerializeToString())


PROBE = 64
KINDS: dict[str, Any] = {"s8": np.int8, "u8": np.uint8}
EXPECTED_PRODUCT = {"s8": PROBE * 255 * 127, "u8": PROBE * 255 * 255}


def run_onnxruntime(model: bytes, x: Floats) -> Floats:
    import onnxruntime as ort

    y: Floats = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    return y


def run_openvino(model: bytes, x: Floats) -> Floats:
    import openvino as ov

    core = ov.Core()
    y: Floats = core.compile_model(core.read_model(model), "CPU")([x])[0]
    return y


def exactness(run: Callable[[bytes, Floats], Floats], weights: str) -> tuple[bool, str]:
    """Run probe() to find out whether a runtime multiplies u8 activations by these weights exactly on this CPU."""
    got = int(run(probe(weights), np.full((PROBE, PROBE), 255, np.float32))[0, 0])
    if got == EXPECTED_PRODUCT[weights]:
        return True, f"its u8 x {weights} product is exact on this CPU"
    said = f"its u8 x {weights} product saturates (found {got:,}, expected {EXPECTED_PRODUCT[weights]:,})"
    return False, f"inexact on this CPU: {said}"


# Notes on PyTorch, for models built from leaves (see eager.py) and for plain modules.
EAGER = ("eager, scaled_dot_product_attention", "eager, unmodified module")


def prepare(asked: dict[str, Any]) -> dict[str, Any]:
    """Prepare all peers and return the answer of this process.

    {"peers": {name: {"file", "exact", "note"} or {"error"}}, "source": origin of the weights, "weights": number of weights}
    """
    from fqvit.models.load import is_plain

    folder, wanted = Path(asked["folder"]), asked["peers"]
    images: Floats = np.load(asked["calibration"])
    model, exported = None, []
    if (asked["weights"] or "").endswith(".onnx"):  # the float model, with input "images" and a batch axis named "batch"
        exported.append(Path(shutil.copy(asked["weights"], folder / "model.onnx")))
    else:
        sizes = asked["image"], asked["patch"], asked["classes"]
        model = float_model(asked["model"], asked["weights"], *sizes, asked["source"], asked["settings"])
    made: dict[str, dict[str, Any]] = {}

    def attempt(name: str, make: Callable[[], tuple[Path, bool | None, str]]) -> None:
        if name not in wanted:
            return
        try:
            file, exact, note = make()
            made[name] = {"file": str(file), "exact": exact, "note": note}
        except Exception as error:  # a library may raise anything; the other peers must still run
            said = str(error).strip().split("\n")[0]
            made[name] = {"error": f"{type(error).__name__}: {said}"}

    def eager() -> tuple[Path, bool | None, str]:
        if model is None:
            raise FqvitError("needs a checkpoint, not an ONNX file")
        return save_torch(model, folder), None, EAGER[is_plain(model.module)]

    def onnx_file() -> Path:
        if model is not None and not exported:
            exported.append(export(model, folder))
        return exported[0]

    def static(weights: str) -> tuple[Path, bool | None, str]:
        exact, note = exactness(run_onnxruntime, weights)
        return quantize(onnx_file(), folder / f"model.{weights}.onnx", images, weights), exact, f"static QDQ; {note}"

    def by_nncf() -> tuple[Path, bool | None, str]:
        exact, note = exactness(run_openvino, "s8")
        return quantize_openvino(onnx_file(), folder / "model.xml", images), exact, f"by NNCF; {note}"

    attempt("torch fp32", eager)
    attempt("onnxruntime fp32", lambda: (onnx_file(), None, "all graph optimizations"))
    attempt("onnxruntime int8", lambda: static("s8"))
    attempt("onnxruntime int8 u8xu8", lambda: static("u8"))
    attempt("openvino fp32", lambda: (onnx_file(), None, "latency hint, one stream"))
    attempt("openvino int8", by_nncf)
    if model is None:
        return {"peers": made, "source": Path(asked["weights"]).name, "weights": onnx_weights(exported[0])}
    weights = sum(p.numel() for p in model.module.parameters() if p.ndim in (2, 4))
    return {"peers": made, "source": model.source, "weights": weights}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print; see worker.py
    warnings.simplefilter("ignore")
    try:
        result = prepare(json.loads(sys.stdin.readline()))
    except CannotRebuild as error:
        result = {"unavailable": str(error)}
    except FqvitError as error:
        result = {"mistake": str(error)}
    answers.write(json.dumps(result) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
