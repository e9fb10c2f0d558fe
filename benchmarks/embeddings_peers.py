"""Other int8 runtimes for embeddings.py: ONNX Runtime with static quantization, and OpenVINO with NNCF.

Both quantize the float model's ONNX export, calibrated on the same images, and run on one thread. ONNX Runtime: QDQ,
per-channel int8 weights, uint8 activations, min-max ranges. NNCF: its defaults for transformers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fqvit.models.load import FloatModel
from fqvit.models.outputs import output_graph
from fqvit.models.pixels import normalise

Images = NDArray[np.uint8]
Floats = NDArray[np.float32]
PEERS = ("onnxruntime int8", "openvino int8")
OUTPUTS = ("embedding", "tokens")


class Peer:
    """A model that maps images uint8 [N, H, W, C] to its embedding and its patch tokens."""

    def __call__(self, images: Images) -> list[Floats]:
        raise NotImplementedError


class _Module(nn.Module):
    """The float model with two outputs, as a module that can be exported."""

    def __init__(self, model: FloatModel) -> None:
        super().__init__()
        p = model.preprocess
        self.graph = output_graph(model.module, (p.channels, p.height, p.width), outputs=OUTPUTS)
        self.leaves = nn.ModuleList(node.leaf for node in self.graph.nodes)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return self.graph.run_all(images)


def export_float(model: FloatModel, path: Path) -> Path:
    """Write the float model as ONNX, once."""
    if not path.exists():
        p = model.preprocess
        example = torch.zeros(1, p.channels, p.height, p.width)
        temporary = path.with_suffix(".part.onnx")
        torch.onnx.export(
            _Module(model).eval(),
            (example,),
            str(temporary),
            input_names=["images"],
            output_names=list(OUTPUTS),
            opset_version=17,
            dynamo=False,
        )
        temporary.rename(path)
    return path


def run_peer(name: str, model: FloatModel, calibration: Images, path: Path) -> Peer:
    """Quantize the model with a peer, or read the result of an earlier run from `path`."""
    exported = export_float(model, path.parent / "float.onnx")
    tensors = [normalise(image[None], model.preprocess).numpy() for image in calibration]
    return (_onnxruntime if name == PEERS[0] else _openvino)(model, exported, tensors, path)


def _onnxruntime(model: FloatModel, exported: Path, tensors: list[Floats], path: Path) -> Peer:
    import onnxruntime as ort
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rows = iter(tensors)

        def get_next(self) -> dict[str, Floats] | None:
            row = next(self.rows, None)
            return None if row is None else {"images": row}

    file = path.with_suffix(".onnx")
    if not file.exists():
        prepared, temporary = path.with_suffix(".prepared.onnx"), path.with_suffix(".part.onnx")
        quant_pre_process(str(exported), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared),
            str(temporary),
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        temporary.rename(file)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    class Session(Peer):
        def __call__(self, images: Images) -> list[Floats]:
            return session.run(list(OUTPUTS), {"images": normalise(images, model.preprocess).numpy()})  # type: ignore[no-any-return]

    return Session()


def _openvino(model: FloatModel, exported: Path, tensors: list[Floats], path: Path) -> Peer:
    import nncf
    import openvino as ov

    core = ov.Core()
    file = path.with_suffix(".xml")
    if not file.exists():
        quantized = nncf.quantize(
            core.read_model(exported), nncf.Dataset(tensors), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(tensors)
        )
        ov.save_model(quantized, file, compress_to_fp16=False)
    compiled = core.compile_model(file, "CPU", {"INFERENCE_NUM_THREADS": 1})

    class Compiled(Peer):
        def __call__(self, images: Images) -> list[Floats]:
            found = compiled(normalise(images, model.preprocess).numpy())
            return [found[i] for i in range(len(OUTPUTS))]

    return Compiled()
