"""Compare a program with its float model: the signal-to-noise ratio of every site, integer and simulated.

If the program outputs embeddings or tokens, the cosine similarity of every site and of these outputs is measured as well. The
simulation is rebuilt from the site parameters in the program, so that no calibration images are needed. Sites that stay in an
accumulator have no codes and are left out; outputs are included. Needs torch. See also: quant/simulate.py, similarity.py,
inspect.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.evaluate.similarity import COMPARED_KINDS, OutputSimilarity, OutputVectors, cosines, described_outputs
from fqvit.ir.moves import Concat
from fqvit.ir.ops import Add
from fqvit.ir.ops import Linear as LinearOp
from fqvit.ir.program import Header, Output, Program, Site
from fqvit.models.graph import Features, Node
from fqvit.models.layers import Patches
from fqvit.models.load import FloatModel, class_count
from fqvit.models.maps import Conv2d, Deconv
from fqvit.models.pixels import normalise
from fqvit.quant.calibration import Calibration
from fqvit.quant.centering import KEY, key_layers
from fqvit.quant.fit import site_shapes
from fqvit.quant.qparams import QParams
from fqvit.quant.recipe import Recipe
from fqvit.quant.simulate import Simulation
from fqvit.quant.weights import LinearLeaf, QuantizedLinear, pixel_zero, weight_rows
from fqvit.runtime.limits import MOST_BYTES
from fqvit.runtime.reference import Integers, Reference

See = Callable[[str, Tensor, Tensor], None]


class SiteNoise(msgspec.Struct, frozen=True, omit_defaults=True):
    """Signal-to-noise ratios of one site in decibels: 10 * log10(sum(float^2) / sum((float - other)^2)); None if equal.

    integer_db, simulated_db: include the noise of all earlier sites. alone_db: the noise of this site only, that is, of the
    float model's values quantized here.
    cosine: cosine similarity between the float and the integer channel vectors, averaged over all tokens and images.
    lowest_cosine: the lowest average of any single image. Both are None if the program outputs only logits.
    """

    site: str
    role: str
    bits: int
    integer_db: float | None
    simulated_db: float | None
    alone_db: float | None
    cosine: float | None = None
    lowest_cosine: float | None = None


@dataclass(frozen=True)
class Comparison:
    """sites: lowest integer_db first. *_agreement: percent of images whose best class is that of the float model.

    outputs: the outputs other than logits. Without logits, both agreements are None.
    """

    images: int
    sites: list[SiteNoise]
    integer_agreement: float | None
    simulated_agreement: float | None
    outputs: list[OutputSimilarity] = field(default_factory=list)


@dataclass
class Power:
    """Energies of signal and noise, summed over all images in float64. cosines: one per image"""

    signal: float = 0.0
    integer: float = 0.0
    simulated: float = 0.0
    alone: float = 0.0
    cosines: list[float] = field(default_factory=list)

    def decibels(self) -> tuple[float | None, float | None, float | None]:
        """Return the three signal-to-noise ratios of SiteNoise, in dB."""
        integer, simulated, alone = (_decibels(self.signal, noise) for noise in (self.integer, self.simulated, self.alone))
        return integer, simulated, alone


class Outputs(NamedTuple):
    """The outputs of the float model, of the program (codes) and of its simulation, in the order of the program's header."""

    exact: tuple[Tensor, ...]
    integers: tuple[Integers, ...]
    simulated: tuple[Tensor, ...]


class Comparer:
    """Accumulates batches of images; result() can be called at any time after the first batch.

    compared_kinds: the kinds of outputs whose cosine similarity is measured
    """

    compared_kinds: tuple[str, ...] = COMPARED_KINDS

    def __init__(self, program: Program, model: FloatModel, *, most_bytes: int = MOST_BYTES) -> None:
        """most_bytes: limit of the reference interpreter's buffers per image"""
        # Use the program's preprocessing, which may differ from the current defaults of the model.
        self.model = dataclasses.replace(model, preprocess=program.header.preprocess)
        self.program = program
        calibration = calibration_of(program, *self._outputs(model))
        self.graph = calibration.graph(self.model)
        self.accumulators = accumulators_of(program)
        self._check(model)
        # The same bits as with numpy, but torch may use several threads.
        self.reference = Reference(program, "torch", most_bytes=most_bytes)
        self.simulation = Simulation(self.model, calibration)
        if calibration.recipe.keys != "plain" and key_layers(self.graph):
            calibration = dataclasses.replace(calibration, centers=self._key_centers())
            self.graph, self.simulation = calibration.graph(self.model), Simulation(self.model, calibration)
        if calibration.recipe.rounding in ("compensated", "weighted", "reconstructed"):
            self._use_weights_of_program()
        self.qparams = dict(self.simulation.sites)
        outputs = program.header.outputs
        self.logits = next((i for i, output in enumerate(outputs) if output.kind == "logits"), None)
        self.vectors = {
            i: OutputVectors(info) for i, info in enumerate(described_outputs(program)) if info.kind in self.compared_kinds
        }
        self.power = {name: Power() for name in (*self.qparams, *self.accumulators)}
        self.images = self.integer_agrees = self.simulated_agrees = 0

    def _outputs(self, model: FloatModel) -> tuple[Features, tuple[str, ...]]:
        """Return the outputs of the graph, as in Calibration."""
        return outputs_of(self.program.header, model)

    def _use_weights_of_program(self) -> None:
        """Simulate with the weights of the program: compensated weights cannot be recomputed without calibration images."""
        program = self.program.unpacked()
        ops = {op.y: op for op in program.ops if isinstance(op, LinearOp)}
        for node in self.graph.nodes:
            if not isinstance(node.leaf, LinearLeaf | Patches) or (zeros := self._input_zeros(node)) is None:
                continue
            outputs, inputs = len(_rows(node)), len(zeros)
            name = self._op_name(node)
            w, bias = (
                (program.constants[ops[name].part(part)] if name in ops else np.zeros(0)).astype(np.int64)
                for part in ("w", "bias")
            )
            if w.shape != (outputs, inputs) or bias.shape != (outputs,):
                said = f"{node.name}: the program has no {outputs} x {inputs} linear layer of this name"
                raise FqvitError(f"{said}. Quantize again with these weights.")
            scale = self._scale_of(name, outputs)
            self.simulation.use(node, QuantizedLinear(w.astype(np.int8), scale, bias + w @ zeros))

    def _op_name(self, node: Node) -> str:
        """Return the buffer that the linear op of a layer writes: the output of its ReLU if that is fused into the op."""
        name = self.simulation.relus.get(node.name, node.name)
        return f"{name}.four" if isinstance(node.leaf, Deconv) else name

    def _input_zeros(self, node: Node) -> NDArray[np.int64] | None:
        """Return the zero points [K] of a layer's inputs, or None if the simulation already uses the program's weights."""
        inputs = _rows(node).shape[1]
        if isinstance(node.leaf, Patches):
            weighted = self.simulation.calibration.recipe.rounding == "weighted"
            return np.full(inputs, pixel_zero(self.program.header.preprocess)) if weighted else None
        q = self.simulation.input_q(node)
        if q is not None and isinstance(node.leaf, Conv2d):
            q = q.tiled(9)
        return None if q is None else q.channel_zeros(inputs)

    @torch.no_grad()
    def _key_centers(self) -> dict[str, NDArray[np.float64]]:
        """Return the constants that were subtracted from keys. A file does not store them: they are part of its biases.

        They are the mean difference between the keys of the float layers and those of the program's layers, computed from the
        same inputs, for an image of the mean color.
        """
        self._use_weights_of_program()
        layers, p = set(key_layers(self.graph)), self.program.header.preprocess
        centers: dict[str, NDArray[np.float64]] = {}

        def call(node: Node, inputs: list[Tensor]) -> Tensor:
            y: Tensor = node.leaf(*inputs, *node.params)
            if node.name in layers:
                key = (y - self.simulation.call(node, inputs)).chunk(3, -1)[KEY]
                centers[node.name] = key.reshape(-1, key.shape[-1]).double().mean(0).numpy()
            return y

        self.graph.run_all(torch.zeros(1, p.channels, p.height, p.width), None, call)
        return centers

    def _scale_of(self, name: str, outputs: int) -> NDArray[np.float64]:
        """Return the scale [O] of a linear layer's accumulator, derived from the op that requantizes it."""
        constants, sites = self.program.constants, self.simulation.sites
        for op in self.program.ops:
            if isinstance(op, Concat) and name in op.xs:
                name = op.y
            if isinstance(op, LinearOp) and op.y == name and op.out != "acc":
                own = self.accumulators.get(name, self.program.header.output)
                scale = own.scale if op.out == "i32" else self._site_of(name).channel_scales(outputs)
                shift = constants[op.part("shift")].astype(np.float64)
                return np.ones(outputs) * scale * constants[op.part("mult")] * np.exp2(-shift)
            if isinstance(op, Add):
                for term in op.terms:
                    if term.x == name:
                        mult = term.mult if isinstance(term.mult, int) else constants[term.mult]
                        return np.full(outputs, float(sites[op.y].scale[0])) * mult / 2.0**op.shift
        raise FqvitError(f"{name}: the program does not use this layer. Quantize again with these weights.")

    def _site_of(self, name: str) -> QParams:
        """Return the parameters of what a linear op writes. A transposed convolution writes four pixels per position."""
        sites = self.simulation.sites
        return sites[name] if name in sites else sites[name.removesuffix(".four")].tiled(4)

    def _check(self, model: FloatModel) -> None:
        """Raise FqvitError if the images, sites or shapes of the float model are not those of the program."""
        program, p, square = self.program, model.preprocess, model.square
        remedy = "Quantize again with these weights, or pass those of the program (--weights)."
        image = square or (p.height, p.width, p.channels)
        if image != program.input_shape:
            takes, has = ("x".join(map(str, shape)) for shape in (image, program.input_shape))
            raise FqvitError(f"{model.name}: these weights take images of {takes}, the program takes {has}. {remedy}")
        shapes, buffers = site_shapes(self.graph, p, square), program.verify().buffers
        sites = (*program.header.sites, *self.accumulators)
        stray = next((site for site in sites if site not in shapes), None)
        if stray is not None:
            raise FqvitError(f"{stray}: the program has this site, but {model.name} does not. {remedy}")
        for site in sites:
            found, wanted = list(shapes[site]), list(buffers[site].shape)
            if found != wanted:
                said = f"{site}: shape {found} in {model.name} with these weights, expected {wanted} as in the program"
                raise FqvitError(f"{said}. {remedy}")

    @torch.no_grad()
    def add(self, images: NDArray[np.uint8], names: Sequence[str] = (), see: See | None = None) -> None:
        """Add images u8 [N, H, W, C]. Keeps the float values of all sites for all N images in memory, so N should be small.

        names: names of the images; see: called with the name, the float values and the integer values of every site and output
        """
        values = normalise(images, self.model.preprocess)
        self._add(values, images, values, names or [f"image {self.images + i}" for i in range(len(images))], see)

    def _add(
        self, exact_input: Tensor, codes: NDArray[np.uint8], simulated_input: Tensor, names: Sequence[str], see: See | None
    ) -> Outputs:
        """Run the float model, the program and its simulation, each on its own input; return their outputs."""
        floats: dict[str, Tensor] = {}

        def keep(node: Node, y: Tensor) -> Tensor:
            if node.name in self.power:
                floats[node.name] = y
                power, q = self.power[node.name], self.qparams.get(node.name)
                power.signal += energy(y)
                if not math.isfinite(power.signal):
                    said = f"{node.name}: the float model gives NaN or infinite values"
                    raise FqvitError(f"{said}. Check the weights and the images.")
                power.alone += 0.0 if q is None else energy(y - q.decode(q.encode(y)))
            return y

        def against_integer(name: str, codes: Integers) -> None:
            if name in floats:
                self._against(name, floats[name], self._decoded(name, codes), see)

        def against_simulated(node: Node, y: Tensor) -> Tensor:
            y = self.simulation.visit(node, y)
            if node.name in floats:
                self.power[node.name].simulated += energy(floats[node.name] - y)
            return y

        exact = self.graph.run_all(exact_input, keep)
        integers = self.reference.run_all(codes, against_integer)
        simulated = self.simulation.graph.run_all(simulated_input, against_simulated, self.simulation.call)
        self.images += len(codes)
        if self.logits is not None:
            best = exact[self.logits].argmax(-1)
            self.integer_agrees += int((torch.from_numpy(integers[self.logits]).argmax(-1) == best).sum())
            self.simulated_agrees += int((simulated[self.logits].argmax(-1) == best).sum())
        for i, vectors in self.vectors.items():
            vectors.add(names, exact[i].numpy(), integers[i])
            if see is not None and self.graph.outputs[i] not in floats:
                see(self.graph.outputs[i], *map(torch.from_numpy, vectors.comparable(exact[i].numpy(), integers[i])))
        return Outputs(exact, integers, simulated)

    def _against(self, name: str, exact: Tensor, integer: Tensor, see: See | None) -> None:
        """Compare the integer values of a site with the float values."""
        power = self.power[name]
        power.integer += energy(exact - integer)
        if self.vectors:
            power.cosines += cosines(exact.numpy(), integer.numpy()).tolist()
        if see is not None:
            see(name, exact, integer)

    def _decoded(self, name: str, codes: Integers) -> Tensor:
        values = torch.from_numpy(codes.astype(np.float32))
        return values * self.accumulators[name].scale if name in self.accumulators else self.qparams[name].decode(values)

    def result(self) -> Comparison:
        if self.images == 0:
            raise FqvitError("compare: no images were read. Pass a folder with at least one readable image.")
        rows = [self._row(name, power) for name, power in self.power.items()]
        rows.sort(key=lambda row: math.inf if row.integer_db is None else row.integer_db)
        outputs = [vectors.result(vectors.neighbours()) for vectors in self.vectors.values()]
        if self.logits is None:
            return Comparison(self.images, rows, None, None, outputs)
        percent = 100 / self.images
        return Comparison(self.images, rows, percent * self.integer_agrees, percent * self.simulated_agrees, outputs)

    def _row(self, name: str, power: Power) -> SiteNoise:
        site = self.program.header.sites.get(name)
        role, bits = (site.role, site.bits) if site else (self.accumulators[name].kind, 32)
        found = SiteNoise(name, role, bits, *power.decibels())
        if not power.cosines:
            return found
        return msgspec.structs.replace(found, cosine=float(np.mean(power.cosines)), lowest_cosine=min(power.cosines))


def compare(program: Program, model: FloatModel, batches: Iterable[NDArray[np.uint8]]) -> Comparison:
    """Compare a program with the float model that it was made from, on batches of images u8 [N, H, W, C]."""
    comparer = Comparer(program, model)
    for images in batches:
        comparer.add(images)
    return comparer.result()


def _rows(node: Node) -> NDArray[np.float64]:
    """Return the weights of a layer in the layout of a linear op, [O, K]."""
    leaf = node.leaf
    assert isinstance(leaf, LinearLeaf | Patches)
    return leaf.weight.detach().flatten(1).double().numpy() if isinstance(leaf, Patches) else weight_rows(leaf)[0]


def accumulators_of(program: Program) -> dict[str, Output]:
    """Return the outputs that are accumulators (logits, projections), by buffer. They are compared like sites."""
    found = zip(program.header.outputs, described_outputs(program), strict=True)
    return {output.buffer: output for output, info in found if info.dtype == "i32"}


def outputs_of(header: Header, model: FloatModel) -> tuple[Features, tuple[str, ...]]:
    """Return Calibration.features and Calibration.outputs of a program. Unnamed outputs are the model's default ones."""
    if any(output.name for output in header.outputs):
        return "logits", tuple(output.label for output in header.outputs)
    return "logits" if class_count(model) is None else header.output.features(), ()


def calibration_of(program: Program, features: Features, outputs: tuple[str, ...] = ()) -> Calibration:
    """Rebuild the calibration of a program from its recipe and sites.

    Raises FqvitError if this version cannot read the recipe.
    """
    header = program.header
    try:
        recipe = msgspec.convert(header.recipe, Recipe)
    except msgspec.ValidationError as error:
        said = f"{header.model}: this version of fqvit cannot read the program's recipe ({error})"
        raise FqvitError(f"{said}. Quantize again.") from None
    sites = {name: qparams_of(site, program) for name, site in header.sites.items()}
    roi = header.input  # of a detector's head
    square = None if roi is None else QParams(roi.bits, np.array([roi.scale]), np.array([roi.zero]))
    return Calibration(recipe, features, header.images, sites, square=square, outputs=outputs)


def qparams_of(site: Site, program: Program) -> QParams:
    """Rebuild the quantization parameters of a site."""
    if site.log2:
        return QParams(site.bits, np.ones(1), np.zeros(1, np.int64), log2=True, zero_code=site.zero_code)
    if site.levels:
        return QParams(site.bits, np.ones(1), np.zeros(1, np.int64), levels=site.levels)
    alpha = None if site.alpha is None else program.constants[site.alpha]
    scale, zero = site.scales_and_zeros(program.constants)
    return QParams(site.bits, scale, zero, alpha if len(scale) == 1 else None)  # per-channel scales include alpha already


def energy(x: Tensor) -> float:
    """Return the sum of the squares in float64."""
    return float(x.double().square().sum())


def _decibels(signal: float, noise: float) -> float | None:
    if noise == 0:
        return None
    return 10 * math.log10(max(signal, 1e-300) / noise)
