"""Emit the leaf modules of a rewritten draft, and the data movement between them, as a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from fqvit.errors import FqvitError
from fqvit.frontend.draft import Draft, Step, View
from fqvit.frontend.gathers import (
    constant_rows,
    joined_runs,
    movement,
    partners,
    rows_and_channels,
    skipped_rows,
    without_repeated_axes,
)
from fqvit.frontend.rewrite import attention_operands, runs, splits_heads
from fqvit.frontend.roles import PRODUCTS, role_of
from fqvit.ir.program import INPUT
from fqvit.models import general, layers, maps
from fqvit.models.graph import IMAGES, Graph, Node
from fqvit.models.layers import Leaf, Role

LONG_ROW = 2**15  # a norm reads rows of at least this length as 8-bit codes: the sum of squares of 16-bit codes would overflow


class Emitter:
    """Emit one node per step, and one per distinct gather between steps.

    is_module(path): whether the path is that of a module without children, such as a linear layer
    """

    def __init__(self, draft: Draft, is_module: Callable[[str], bool]) -> None:
        self.draft, self.is_module = draft, is_module
        self.readers = draft.readers()
        self.roles: dict[Step, Role] = {}
        self.nodes: list[Node] = []
        self.names: dict[Step, str] = {}
        self.taken: Counter[str] = Counter((IMAGES, INPUT))  # reserved, but a module may have the same name
        self.moved: dict[tuple[object, ...], str] = {}

    def graph(self) -> Graph:
        for step in self.draft.steps():
            if step.kind == "images":
                self.names[step] = IMAGES
                continue
            self.roles[step] = role_of(step, self.readers[step])
            try:
                getattr(self, f"_{step.kind}")(step)
            except (AssertionError, RuntimeError, IndexError) as error:
                first, *_ = str(error).strip().splitlines() or [""]  # the text of an assertion is empty
                reason = f" ({first.rstrip('.')})" if first else ""
                raise FqvitError(f"{step.path or 'model'}: this form of {step.kind} is not supported{reason}.") from error
        outputs = [self.value(view, "output") for view in self.draft.outputs]
        return Graph(tuple(self.nodes), outputs[0], tuple(outputs[1:]))

    def node(self, name: str, leaf: Leaf, inputs: tuple[str, ...], params: tuple[Tensor, ...] = ()) -> str:
        """Append a node under a unique name and return the name."""
        self.taken[name] += 1
        if self.taken[name] > 1:
            name = f"{name}@{self.taken[name] - 1}"
        self.nodes.append(Node(name, leaf.eval(), inputs, params))
        return name

    def step(self, step: Step, leaf: Leaf, inputs: tuple[str, ...], params: tuple[Tensor, ...] = ()) -> None:
        self.names[step] = self.node(self._name(step), leaf, inputs, params)

    def _name(self, step: Step) -> str:
        path = step.path
        if step.kind in ("linear", "depthwise", "norm", "activation") and (self.is_module(path) or path.endswith(".qkv")):
            return path
        label = {"activation": "act", "embed": "embed"}.get(step.kind, step.kind)
        if step.kind in ("add", "multiply"):
            count = sum(name.startswith(f"{path}.{label}" if path else label) for name in self.taken)
            label = f"{label}{count + 1}"
        if step.kind == "embed":
            return label if not self.taken[label] else f"{label}@{self.taken[label]}"
        return f"{path}.{label}" if path else label

    # Data movement

    def value(self, view: View, path: str, narrow: bool = False) -> str:
        """Return the name of a node whose output is the view. narrow: read 8-bit codes of a wider residual stream"""
        assert view.scale is None and view.offset is None
        if len(view.steps) != 1:
            return self._join(view, path, narrow)
        step, name = view.step, self.names[view.step]
        if narrow and self.roles.get(step) == "residual":
            name = self._narrowed(step)
        if view.shape == step.shape and view.is_identity():
            return name
        key = (name, view.shape, view.index.numpy().tobytes())
        if key not in self.moved:
            self.moved[key] = self.node(f"{path}.input" if path else "input", movement(view), (name,))
        return self.moved[key]

    def _narrowed(self, step: Step) -> str:
        key = ("narrow", self.names[step])
        if key not in self.moved:
            self.moved[key] = self.node(f"{self.names[step]}.narrow", general.Narrow(), (self.names[step],))
        return self.moved[key]

    def _join(self, view: View, path: str, narrow: bool) -> str:
        width = joined_runs(view)
        index = view.index.reshape(-1, width)[:, 0]
        rows = torch.where(index >= 0, index // width, -1)
        key = ("join", narrow, *(self.names[s] for s in view.steps), view.shape, rows.numpy().tobytes())
        if key not in self.moved:
            leaf = general.Join(rows, width, view.shape, "inner" if narrow else "residual")
            self.moved[key] = self.node(f"{path}.join", leaf, tuple(self.names[step] for step in view.steps))
        return self.moved[key]

    def _read(self, step: Step, i: int = 0) -> str:
        return self.value(step.inputs[i], self._name(step), narrow=step.kind in PRODUCTS)

    # One method per kind of step

    def _linear(self, step: Step) -> None:
        weight, bias = step.data["weight"].float(), step.data["bias"]
        view = step.inputs[0]
        if len(view.steps) == 1 and view.step.kind == "images":
            self._pixels(step, weight, bias)
            return
        leaf = layers.Linear(weight.shape[1], weight.shape[0], self.roles[step], bias is not None)
        leaf.weight.data = weight
        if leaf.bias is not None:
            leaf.bias.data = bias.float()
        self.step(step, leaf, (self._read(step),))

    def _pixels(self, step: Step, weight: Tensor, bias: Tensor | None) -> None:
        """Emit a linear layer that reads pixels: a patch embedding, or any other convolution of the images."""
        view, outputs = step.inputs[0], len(weight)
        height, width, channels = view.step.shape
        terms = torch.zeros(outputs) if bias is None else bias.float()
        if runs(view) % channels:
            raise FqvitError(f"{step.path or 'model'}: reads single colour channels of the images, which is not supported.")
        positions = view.index.reshape(-1, view.shape[-1] // channels, channels)[..., 0]
        index = torch.where(positions >= 0, positions // channels, -1)
        window, stride = step.data.get("window"), step.data.get("stride")
        if window is not None and window == stride and window[0] == window[1] and index.numel() == height * width:
            patches = layers.Patches(channels, window[0], outputs, self.roles[step])
            patches.weight.data = weight.view(outputs, *window, channels).permute(0, 3, 1, 2).contiguous()
            patches.bias.data = terms
            self.step(step, patches, (IMAGES,))
            return
        role = self.roles[step]
        step.shape = (len(index), outputs)
        stem = general.Stem(index, weight.view(outputs, -1, channels).contiguous(), terms, role)
        self.step(step, stem, (IMAGES,))

    def _depthwise(self, step: Step) -> None:
        view, weight = step.inputs[0], step.data["weight"].float()
        bias = step.data["bias"]
        channels = weight.shape[1]
        found = rows_and_channels(view) if len(view.steps) == 1 else None
        if found is None:
            index = torch.arange(view.index.numel() // channels).view(view.shape[:-1])
            x = self._read(step)
        else:
            index, order = found
            source = view.step.view().moved(lambda t: t[..., order])
            x = self.value(source, self._name(step), narrow=True)
        terms = torch.zeros(channels) if bias is None else bias.float()
        self.step(step, general.Depthwise(index, weight, terms, self.roles[step]), (x,))

    def _affine(self, step: Step) -> None:
        channels = step.shape[-1]
        lead = step.shape[:-1] or (1,)  # the op Depthwise reads rows: a vector becomes a row, and the result a vector again
        index = torch.arange(step.size // channels).view(*lead, 1)
        leaf = general.Depthwise(index, step.data["weight"].float(), step.data["bias"].float(), self.roles[step])
        x = self.value(step.inputs[0].reshaped(*lead, channels), self._name(step), narrow=True)
        self.step(step, leaf, (x,))
        if lead != step.shape[:-1]:
            vector = general.Route(step.shape, (0,), step.shape, times=1)
            self.names[step] = self.node(f"{self.names[step]}.vector", vector, (self.names[step],))

    def _norm(self, step: Step) -> None:
        data = step.data
        leaf = layers.LayerNorm(step.shape[-1], data["eps"], self.roles[step], data["center"])
        leaf.weight.data, leaf.bias.data = data["weight"].float(), data["bias"].float()
        x = self.value(step.inputs[0], self._name(step), narrow=step.shape[-1] >= LONG_ROW)
        self.step(step, leaf, (x,))

    def _activation(self, step: Step) -> None:
        label, view = step.data["name"], step.inputs[0]
        x = self._read(step)
        if label == "gelu":
            leaf: Leaf = layers.Gelu()
            leaf.role = self.roles[step]
        elif label == "relu" and self._fuses(view):
            leaf = maps.Relu()
        else:
            leaf = general.Activation(label, step.data["function"], self.roles[step])
        self.step(step, leaf, (x,))

    def _fuses(self, view: View) -> bool:
        """Return whether a ReLU of this view can be part of the linear layer before it."""
        step = view.step
        if step.kind != "linear" or any(source.kind == "images" for source in step.inputs[0].steps):
            return False
        return len(self.readers[step]) == 1 and view.is_identity() and view.shape == step.shape

    def _add(self, step: Step) -> None:
        leaf = layers.Add(self.roles[step])
        self.step(step, leaf, (self._read(step, 0), self._read(step, 1)))

    def _multiply(self, step: Step) -> None:
        a, b = step.inputs
        if without_repeated_axes(a).shape != a.shape:
            a, b = b, a
        name = self._name(step)
        inputs = (self.value(a, name, narrow=True), self.value(without_repeated_axes(b), name, narrow=True))
        self.step(step, general.Multiply(self.roles[step]), inputs)

    def _rotary(self, step: Step) -> None:
        cosines, sines = step.inputs
        x = View(cosines.steps, cosines.index)
        *_, tokens, width = x.shape
        sin = torch.ones(x.shape, dtype=torch.float64) if sines.scale is None else sines.scale
        cos = torch.ones(x.shape, dtype=torch.float64) if cosines.scale is None else cosines.scale
        partner = partners(x.index.reshape(-1, width), sines.index.reshape(-1, width), (sin != 0).reshape(-1, width))
        if partner is None:
            raise FqvitError(
                f"{step.path or 'model'}: adds a rearranged copy of a value in an unknown pattern, which is not supported."
            )
        tables = []
        for table in (cos, sin):
            rows_of = table.reshape(-1, tokens, width)
            if not bool((rows_of == rows_of[:1]).all()):
                raise FqvitError(f"{step.path or 'model'}: rotary positions that differ between heads are not supported.")
            tables.append(rows_of[0].float())
        leaf = general.Rotary(tables[0], tables[1], partner, self.roles[step])
        self.step(step, leaf, (self.value(x, self._name(step), narrow=True),))

    def _scores(self, step: Step) -> None:
        scale, bias = step.data["scale"], step.data.get("bias")
        equal = bool((scale == scale[0]).all())
        factors = None if equal else scale.float()
        q, k = self._heads(step)
        if bias is None:
            self.step(step, layers.Scores(float(scale[0]) if equal else 1.0, factors), (q, k))
            return
        table, index = torch.unique(bias.flatten(1).T.float(), dim=0, return_inverse=True)
        leaf = layers.BiasedScores(float(scale[0]) if equal else 1.0, index.view(bias.shape[1:]), factors)
        self.step(step, leaf, (q, k), (table,))

    def _heads(self, scores: Step) -> tuple[str, str]:
        """Return the names of the nodes of Q and K. If Q, K and V are parts of one linear layer, the nodes are Heads of it."""
        path = scores.path
        context = self._context_of(scores)
        found = attention_operands(context) if context is not None else None
        if found is None or context is None or not self._one_layer(found):
            return self._read(scores, 0), self._read(scores, 1)
        heads = found[0].shape[-3]
        qkv = self.names[found[0].step]
        names = [self.node(f"{path}.{part}" if path else part, layers.Heads(heads, i), (qkv,)) for i, part in enumerate("qkv")]
        self.moved[("v", id(context))] = names[2]
        return names[0], names[1]

    def _one_layer(self, found: tuple[View, View, View]) -> bool:
        same = all(view.steps == found[0].steps for view in found) and found[0].step.kind == "linear"
        return same and all(splits_heads(view, i) for i, view in enumerate(found))

    def _context_of(self, scores: Step) -> Step | None:
        readers = self.readers[scores]
        if len(readers) != 1 or readers[0][0] is None or readers[0][0].kind != "softmax":
            return None
        readers = self.readers[readers[0][0]]
        if len(readers) != 1 or readers[0][0] is None or readers[0][0].kind != "context":
            return None
        return readers[0][0]

    def _softmax(self, step: Step) -> None:
        leaf = layers.Softmax(step.data.get("mask"))
        leaf.role = self.roles[step]
        self.step(step, leaf, (self._read(step),))

    def _context(self, step: Step) -> None:
        v = self.moved.get(("v", id(step))) or self._read(step, 1)
        self.step(step, layers.Context(), (self._read(step, 0), v))

    def _mean(self, step: Step) -> None:
        view = step.inputs[0]
        skip = skipped_rows(view)
        if skip is not None:
            leaf: Leaf = layers.Mean(skip)
            self.step(step, leaf, (self.names[view.step],))
            return
        self.step(step, general.MeanRows(), (self._read(step),))

    def _max(self, step: Step) -> None:
        view, channels = step.inputs[0], step.shape[-1]
        if len(view.steps) != 1 or view.step.shape[-1] != channels or runs(view) % channels:
            index = torch.arange(view.index.numel() // channels).view(view.shape[:-1])
            self.step(step, general.MaxRows(index), (self._read(step),))
            return
        first = view.index[..., 0]
        self.step(step, general.MaxRows(torch.where(first >= 0, first // channels, -1)), (self.names[view.step],))

    def _embed(self, step: Step) -> None:
        view, offset = step.inputs[0], step.data["offset"].float()
        prefix = constant_rows(view)
        if prefix is not None:
            positions = offset.clone()
            positions[:prefix] = 0
            params = (offset[None, :prefix].contiguous(), positions[None])
            self.step(step, self._with_role(layers.Embed(), step), (self.names[view.step],), params)
            return
        self.step(step, self._with_role(general.Shift(offset), step), (self._read(step),))

    def _with_role(self, leaf: Leaf, step: Step) -> Leaf:
        leaf.role = self.roles[step]
        return leaf
