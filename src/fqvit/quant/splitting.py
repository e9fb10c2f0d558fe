"""Split MLPs: give the few hidden neurons with outlying ranges an MLP of their own.

x + fc2(gelu(fc1(n))) is a sum over neurons, so the float model computes the same function as two MLPs in a row that read the
same norm n: first the outliers, then all other neurons.
    x' = x + fc2.outliers(gelu(fc1.outliers(n)))        y = x' + fc2(gelu(fc1(n)))
In ViT-Tiny, one of the 768 neurons of a block reaches 220, the others at most 9. In one MLP with it, the codes of the others
are coarser: those of fc1 outputs 19 times, those of GELU outputs nearly 3 times. An MLP of one neuron costs almost nothing.
See also: calibrate.py (splits after the float pass), calibration.py (stores the neurons).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fqvit.errors import FqvitError
from fqvit.models.graph import Graph, Node
from fqvit.models.layers import Add, Gelu, Leaf, Linear
from fqvit.quant.channels import FEW_ROWS, GELU_DEPTH, ChannelRange
from fqvit.quant.observers import MinMax, Observer

Floats = NDArray[np.float64]
Outliers = Mapping[str, Sequence[int]]  # the outlying neurons of MLPs, by the name of the first layer
Parts = Mapping[str, Sequence[Observer]]  # the observers of every site
SUFFIX = ".outliers"  # of the names of new nodes
SHARE = 1 / 32  # at most this share of the neurons are outliers
RATIO = 4.0  # the range of an outlier is more than RATIO times those of all but SHARE of the neurons
LEAST = 1.0  # smaller ranges are treated like this one: GELU's inputs need a range of about 3 in any case


class Mlp(NamedTuple):
    """The nodes of an MLP: add(x, fc2(act(fc1(n)))), where nothing else reads the outputs of fc1, act and fc2."""

    fc1: Node
    act: Node
    fc2: Node
    add: Node

    @property
    def stream(self) -> str:
        """The name of x."""
        return next(name for name in self.add.inputs if name != self.fc2.name)

    def outliers(self, neurons: Sequence[int]) -> Mlp:
        """Return the new nodes: an MLP of these neurons without the bias of fc2, whose result is added to x."""
        fc1, act, fc2, add = (node.name + SUFFIX for node in self)
        return Mlp(
            Node(fc1, _rows(self.fc1, neurons), self.fc1.inputs),
            Node(act, self.act.leaf, (fc1,)),
            Node(fc2, _columns(self.fc2, neurons, bias=False), (act,)),
            Node(add, self.add.leaf, tuple(fc2 if name == self.fc2.name else name for name in self.add.inputs)),
        )

    def others(self, neurons: Sequence[int]) -> Mlp:
        """Return the same MLP with these neurons only, whose result is added to that of the outliers."""
        inputs = tuple(name if name == self.fc2.name else self.add.name + SUFFIX for name in self.add.inputs)
        return self._replace(
            fc1=dataclasses.replace(self.fc1, leaf=_rows(self.fc1, neurons)),
            fc2=dataclasses.replace(self.fc2, leaf=_columns(self.fc2, neurons, bias=True)),
            add=dataclasses.replace(self.add, inputs=inputs),
        )


def find_mlps(graph: Graph) -> dict[str, Mlp]:
    """Return the MLPs that can be split, by the name of their first layer. x must be computed before that layer."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    found: dict[str, Mlp] = {}
    computed: set[str] = set()
    for node in graph.nodes:
        chain = [node] if type(node.leaf) is Linear else []
        for kind in (Gelu, Linear, Add) if chain else ():
            following = readers.get(chain[-1].name, [])
            if len(following) != 1 or type(following[0].leaf) is not kind or chain[-1].name in graph.outputs:
                break
            chain.append(following[0])
        if len(chain) == len(Mlp._fields) and Mlp(*chain).stream in computed:
            found[node.name] = Mlp(*chain)
        computed.add(node.name)
    return found


def outlying(high: Floats) -> tuple[int, ...]:
    """Return the outliers among neurons. high: upper ends of the ranges of their GELU outputs, [C]"""
    usual = max(float(np.quantile(high, 1 - SHARE, method="lower")), LEAST)
    return tuple(np.nonzero(high > RATIO * usual)[0].tolist())


def split(graph: Graph, outliers: Outliers) -> Graph:
    """Return the graph with these neurons in MLPs of their own. The leaves of the given graph are not modified."""
    if not outliers:
        return graph
    mlps = find_mlps(graph)
    added: dict[str, list[Node]] = {}  # by the node that they precede
    changed: dict[str, Node] = {}
    for name, neurons in outliers.items():
        if name not in mlps:
            raise FqvitError(f"outliers: this model has no MLP with GELU whose first layer is {name}. Calibrate it again.")
        mlp, size = mlps[name], len(weight_of(mlps[name].fc1))
        others = sorted(set(range(size)) - set(neurons))
        if len(neurons) + len(others) != size or not neurons or not others:
            raise FqvitError(f"outliers: {name}: expected some, not all, of the neurons 0 to {size - 1}, each at most once.")
        small, large = mlp.outliers(neurons), mlp.others(others)
        added[name] = list(small)  # before fc1, so that the larger MLP stays together and its ops can be fused
        changed |= {node.name: node for node in large}
    nodes = tuple(each for node in graph.nodes for each in (*added.get(node.name, ()), changed.get(node.name, node)))
    return dataclasses.replace(graph, nodes=nodes)


def choose_outliers(graph: Graph, parts: Parts) -> dict[str, tuple[int, ...]]:
    """Return the outliers of every MLP whose sites have the statistics that `split_parts` needs. parts: observers per site"""
    found = {name: outlying(_channels(parts, mlp).ranges()[1]) for name, mlp in find_mlps(graph).items() if _fits(parts, mlp)}
    return {name: neurons for name, neurons in found.items() if neurons}


def split_parts(graph: Graph, outliers: Outliers, parts: Parts) -> dict[str, Sequence[Observer]]:
    """Return the observers of the sites that splitting changes or adds, computed from the observers of the whole MLPs.

    An input x of GELU is at most 0.17 larger than its output, which gives the range of fc1 outputs. The range of the sum of x
    and the outliers' outputs follows from the ranges of both and the weights.
    """
    found: dict[str, Sequence[Observer]] = {}
    mlps = find_mlps(graph)
    for name, neurons in outliers.items():
        if name not in mlps or not _fits(parts, mlps[name]):
            raise FqvitError(f"outliers: {name} is not the first layer of an MLP that can be split. Leave it out.")
        mlp = mlps[name]
        seen, (least, largest) = _channels(parts, mlp), _range(parts, name)
        low, high = seen.ranges()
        others = sorted(set(range(len(low))) - set(neurons))
        for chosen, suffix in ((list(neurons), SUFFIX), (others, "")):
            found[mlp.act.name + suffix] = [_selected(seen, chosen, mlp.act.name + suffix)]
            top = min(float(high[chosen].max()) + GELU_DEPTH, largest)
            found[name + suffix] = [_with_range(parts[name][0], name + suffix, least, top)]
        weight = weight_of(mlp.fc2)[:, list(neurons)].detach().cpu().double().numpy()
        ends = np.stack([weight * low[list(neurons)], weight * high[list(neurons)]])
        stream = _range(parts, mlp.stream)
        ends_of_sum = stream[0] + float(ends.min(0).sum(1).min()), stream[1] + float(ends.max(0).sum(1).max())
        found[mlp.add.name + SUFFIX] = [_with_range(parts[mlp.add.name][0], mlp.add.name + SUFFIX, *ends_of_sum)]
    return found


def _fits(parts: Parts, mlp: Mlp) -> bool:
    """Return whether fc1 outputs and residual sums have one range, and GELU outputs one range per channel."""
    kinds = [[type(part) for part in parts.get(name, ())] for name in (mlp.fc1.name, mlp.stream, mlp.add.name, mlp.act.name)]
    return kinds == [[MinMax]] * 3 + [[ChannelRange]] and _channels(parts, mlp).rows >= FEW_ROWS


def _channels(parts: Parts, mlp: Mlp) -> ChannelRange:
    (seen,) = parts[mlp.act.name]
    assert isinstance(seen, ChannelRange)
    return seen


def _range(parts: Parts, name: str) -> tuple[float, float]:
    (seen,) = parts[name]
    assert isinstance(seen, MinMax)
    return seen.range()


def _with_range(seen: Observer, site: str, low: float, high: float) -> Observer:
    return Observer.from_state({**seen.state(), "site": site, "range": np.array([low, high])})


def _selected(seen: ChannelRange, neurons: list[int], site: str) -> Observer:
    low, high = (ends[neurons] for ends in seen.ranges())
    return Observer.from_state({**seen.state(), "site": site, "elements": seen.rows * len(neurons), "low": low, "high": high})


def _rows(node: Node, neurons: Sequence[int]) -> Leaf:
    bias = node.leaf.bias
    assert bias is None or isinstance(bias, Tensor)
    return with_weight(node.leaf, weight_of(node)[list(neurons)], None if bias is None else bias[list(neurons)])


def _columns(node: Node, neurons: Sequence[int], bias: bool) -> Leaf:
    kept = node.leaf.bias
    assert kept is None or isinstance(kept, Tensor)
    return with_weight(node.leaf, weight_of(node)[:, list(neurons)], kept if bias else None)


def weight_of(node: Node) -> Tensor:
    """Return the weight [O, K] of a linear layer."""
    assert isinstance(node.leaf, Linear)
    return node.leaf.weight


def with_weight(leaf: Leaf, weight: Tensor, bias: Tensor | None) -> Leaf:
    """Return a copy of a linear layer with another weight and bias."""
    found = copy.copy(leaf)
    assert isinstance(found, Linear)
    # A shallow copy shares the dictionary of parameters, which must not change in the original.
    found._parameters = dict(leaf._parameters)
    found.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    found.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
    return found
