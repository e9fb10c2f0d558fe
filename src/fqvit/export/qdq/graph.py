"""What QDQ export builds with: ONNX nodes and constants, tensors, and what a target wants of its QuantizeLinear nodes.

Every buffer of codes becomes a float tensor f = (code - zero) scale. Any scale and zero do, as long as producer and readers
agree: where a site has a step for each channel, those are in the weights, and f counts codes. Neighbour: qdq.py.
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
TOLERANCE = 1e-6  # factors this near to 1 are those of a multiplier's last bits: nothing is emitted for them


@dataclass(frozen=True)
class QdqParams:
    """How codes of a buffer are written: f = (code - zero) scale, each [1] or [C]; codes are 0 .. 2^bits - 1.

    product: a matrix product reads them.
    """

    scale: Floats
    zero: Ints
    bits: int = 8
    product: bool = True


@dataclass(frozen=True)
class QuantizedTensor:
    """A float tensor of the graph: integer = f / scale + zero. Accumulators have zero 0 and often a scale a channel.

    shape leaves out the batch. normalise: weights of attention whose rows are still to be divided by their sums.
    """

    name: str
    shape: tuple[int, ...]
    scale: Floats
    zero: Ints
    normalise: bool = False


@dataclass(frozen=True)
class Profile:
    """What a target's runtime takes.

    wide: 16-bit codes. every_site: QDQ at sites that no matrix product reads, too. symmetric: int8 with zero point 0.
    middle: added to weights, whose zero point it is. 128 makes them uint8: ONNX Runtime's products of uint8 with int8 saturate
    on CPUs without VNNI, and those of uint8 with uint8 are exact everywhere. softmax: the op itself between two sites; ONNX
    Runtime has a kernel of codes for that, which is coarse.
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
    """Collects nodes and constants. Tensors are named after the buffers of the program."""

    profile: Profile
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    qdq_sites: int = 0
    float_sites: list[str] = field(default_factory=list)  # sites of the program that stay in float
    recentred: list[str] = field(default_factory=list)  # sites whose codes lie otherwise than the program's

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
        """Another shape of everything but the batch."""
        text = "x".join(map(str, sizes))
        return self.node("Reshape", [x, self.constant(f"shape.{text}", np.array([0, *sizes], np.int64))], y)

    def scaled(self, x: str, gain: Floats, offset: Floats, y: str) -> str:
        """x gain + offset, without what changes nothing. An offset below a thousandth of a code is the caller's to drop."""
        if not np.allclose(gain, 1, rtol=TOLERANCE, atol=0):
            x = self.node("Mul", [x, self.float32(f"{y}.gain", collapsed(gain))], f"{y}.scaled")
        if np.any(offset != 0):
            x = self.node("Add", [x, self.float32(f"{y}.offset", collapsed(offset))], f"{y}.shifted")
        return x

    def quantized(self, x: str, y: str, shape: tuple[int, ...], params: QdqParams) -> QuantizedTensor:
        """QuantizeLinear and DequantizeLinear, as far as the target has them at such a site."""
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
        # Activations have one scale: ONNX Runtime's own fusions fail where there is one a channel.
        assert len(zero) == 1, f"{y}: a zero point a channel"
        relative = self.float32(f"{y}.steps", scale / scale[0])
        x = self.node("Div", [x, relative], f"{y}.even")
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


def collapsed(values: NDArray[Any]) -> NDArray[Any]:
    """[1] where all channels are equal."""
    flat = np.atleast_1d(values)
    return flat[:1] if (flat == flat[0]).all() else flat
