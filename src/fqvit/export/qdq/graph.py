"""Build a QDQ ONNX graph: nodes, constants, quantized tensors, and the requirements of each target runtime.

Every buffer of codes becomes a float tensor f = (code - zero) * scale. Any scale and zero will do as long as the op that
writes a tensor and the ops that read it agree. If a site (a quantized tensor) has per-channel scales and a matrix
product reads it, their mean suffices: the program's weights already contain the per-channel factors.
See also: writer.py, scales.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

Target = Literal["ort", "openvino", "tensorrt"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TOLERANCE = 1e-6  # a factor this close to 1 differs only by the rounding of a fixed-point multiplier: no Mul is emitted


@dataclass(frozen=True)
class QdqParams:
    """Quantization parameters of a buffer: f = (code - zero) * scale, with codes 0 .. 2^bits - 1.

    scale: float64 [1] or [C]   zero: int64 [1] or [C]   product: whether a matrix product reads the buffer
    """

    scale: Floats
    zero: Ints
    bits: int = 8
    product: bool = True


@dataclass(frozen=True)
class QuantizedTensor:
    """A float tensor of the graph that represents integers: integer = f / scale + zero.

    Accumulators have zero point 0 and often one scale per channel. shape: without the batch axis
    normalise: attention weights whose rows are not yet divided by their sums
    """

    name: str
    shape: tuple[int, ...]
    scale: Floats
    zero: Ints
    normalise: bool = False


@dataclass(frozen=True)
class Profile:
    """Describes what a target runtime supports.

    opset, ir: versions of the ONNX file
    wide: 16-bit codes are supported
    every_site: QDQ also at sites that no matrix product reads
    symmetric: int8 codes with zero point 0
    middle: zero point of the weights. 128 makes them uint8: in ONNX Runtime, uint8 x int8 products saturate on CPUs without
    VNNI, while uint8 x uint8 products are exact everywhere
    softmax: emit the op Softmax. Off for ONNX Runtime, which would fuse it into a coarse integer kernel
    """

    opset: int
    ir: int
    wide: bool
    every_site: bool
    symmetric: bool
    middle: int = 0
    softmax: bool = True


PROFILES: dict[str, Profile] = {
    "ort": Profile(opset=21, ir=10, wide=True, every_site=True, symmetric=False, middle=128, softmax=False),
    "openvino": Profile(opset=20, ir=9, wide=False, every_site=True, symmetric=False),
    "tensorrt": Profile(opset=20, ir=9, wide=False, every_site=False, symmetric=True),
}


@dataclass
class QdqGraph:
    """Collects nodes and constants. Tensors are named after the buffers of the program.

    qdq_sites: number of QuantizeLinear/DequantizeLinear pairs   float_sites: sites of the program that stay in float
    recentred: sites whose codes were rescaled to be symmetric
    """

    profile: Profile
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    qdq_sites: int = 0
    float_sites: list[str] = field(default_factory=list)
    recentred: list[str] = field(default_factory=list)

    def node(self, kind: str, inputs: list[str], y: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [y], name=y, **attributes))
        return y

    def constant(self, name: str, values: NDArray[Any]) -> str:
        if name not in self.constants:
            self.constants[name] = numpy_helper.from_array(np.asarray(values, order="C"), name)
        return name

    def float32(self, name: str, values: Floats | float) -> str:
        return self.constant(name, np.asarray(values, np.float32))

    def reshape(self, x: str, sizes: tuple[int, ...], y: str) -> str:
        """Reshape every axis except the batch."""
        text = "x".join(map(str, sizes))
        return self.node("Reshape", [x, self.constant(f"shape.{text}", np.array([0, *sizes], np.int64))], y)

    def scaled(self, x: str, gain: Floats, offset: Floats, y: str) -> str:
        """Emit x * gain + offset, without factors of 1 and offsets of 0. Callers drop negligible offsets themselves."""
        if not np.allclose(gain, 1, rtol=TOLERANCE, atol=0):
            x = self.node("Mul", [x, self.float32(f"{y}.gain", collapsed(gain))], f"{y}.scaled")
        if np.any(offset != 0):
            x = self.node("Add", [x, self.float32(f"{y}.offset", collapsed(offset))], f"{y}.shifted")
        return x

    def quantized(self, x: str, y: str, shape: tuple[int, ...], params: QdqParams) -> QuantizedTensor:
        """Quantize x to the codes of buffer y and dequantize it, if the target supports QDQ at this site."""
        scale, zero, bits = collapsed(params.scale), collapsed(params.zero), params.bits
        tensor = QuantizedTensor(y, shape, scale, zero)
        if (bits > 8 and not self.profile.wide) or not (self.profile.every_site or params.product):
            self.float_sites.append(y)
            self.node("Identity", [x], y)
            return tensor
        if bits not in (8, 16):
            x = self._clipped(x, y, -zero * scale, ((1 << bits) - 1 - zero) * scale)
        if len(scale) == 1 and len(zero) == 1:
            self._qdq_pair(x, y, bits, float(scale[0]), int(zero[0]))
            return tensor
        # QuantizeLinear gets one scale per tensor: fusions of ONNX Runtime fail on activations with per-channel scales.
        assert len(zero) == 1, f"{y}: found one zero point per channel, expected one per tensor"
        relative = self.float32(f"{y}.relative_scale", scale / scale[0])
        x = self.node("Div", [x, relative], f"{y}.per_tensor")
        self.node("Mul", [self._qdq_pair(x, f"{y}.restored", bits, float(scale[0]), int(zero[0])), relative], y)
        return tensor

    def _qdq_pair(self, x: str, y: str, bits: int, scale: float, zero: int) -> str:
        dtype: Any = np.uint8 if bits <= 8 else np.uint16
        last = (1 << bits) - 1
        if self.profile.symmetric:
            dtype = np.int8
            if zero > 128 or last - zero > 127:
                self.recentred.append(y)
                scale *= max(zero, last - zero) / 127
            zero = 0
        parts = [self.float32(f"{y}.scale", scale), self.constant(f"{y}.zero", np.array(zero, dtype))]
        self.qdq_sites += 1
        codes = self.node("QuantizeLinear", [x, *parts], f"{y}.codes")
        return self.node("DequantizeLinear", [codes, *parts], y)

    def _clipped(self, x: str, y: str, low: Floats, high: Floats) -> str:
        if len(low) == 1:
            ends = [self.float32(f"{y}.low", low[0]), self.float32(f"{y}.high", high[0])]
            return self.node("Clip", [x, *ends], f"{y}.clipped")
        x = self.node("Max", [x, self.float32(f"{y}.low", low)], f"{y}.raised")
        return self.node("Min", [x, self.float32(f"{y}.high", high)], f"{y}.clipped")


def rms_normalized(graph: QdqGraph, x: str, epsilon: float, y: str) -> str:
    """Emit x / sqrt(mean(x^2) + epsilon) over the last axis. Only opset 23 and later have RMSNormalization."""
    axis = graph.constant("axis.last", np.array([-1], np.int64))
    mean = graph.node("ReduceMean", [graph.node("Mul", [x, x], f"{y}.squares"), axis], f"{y}.mean_square", keepdims=1)
    mean = graph.node("Add", [mean, graph.float32(f"{y}.epsilon", epsilon)], f"{y}.mean_square_epsilon")
    return graph.node("Div", [x, graph.node("Sqrt", [mean], f"{y}.rms")], f"{y}.normalized")


def collapsed(values: NDArray[Any]) -> NDArray[Any]:
    """Return [1] if all channels are equal, else the array itself."""
    flat = np.atleast_1d(values)
    return flat[:1] if (flat == flat[0]).all() else flat
