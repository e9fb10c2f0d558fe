"""Double hidden neurons of MLPs: two copies of a neuron with slightly different inputs have different rounding errors.

    fc2(g) = ... + w g(z) + ...   becomes   ... + w/2 g(z - d) + w/2 g(z + d) + ...   with d = OFFSET * scale of g(z)'s codes
For large z, where GELU is the identity, both codes differ by 3.5 steps on average: together they round z to multiples of half
a step. Most inputs are negative, and there GELU is flatter. A smaller offset would hardly change the codes of such inputs; a
larger one would change the function, because the mean of g(z - d) and g(z + d) differs from g(z) by about g''(z) d^2 / 2.
In the graph both copies are equal, so that the function of the float model stays the same; the offsets are added to the biases
of the rounded layer (compensate.py). The weights that read the copies are halved, so they get finer, too.
A program grows by one row of fc1 and one column of fc2 per doubled neuron. In every MLP, those neurons have two copies whose
scale times the norm of the weights that read them is largest.
See also: splitting.py (finds MLPs), calibration.py (stores the neurons).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fqvit.errors import FqvitError
from fqvit.models.graph import Graph
from fqvit.quant.qparams import QParams
from fqvit.quant.splitting import Outliers, find_mlps, weight_of, with_weight

Floats = NDArray[np.float64]
OFFSET = 7 / 4
SHARE = 1 / 8  # of the neurons of an MLP have two copies


def double(graph: Graph, doubled: Outliers) -> Graph:
    """Return the graph with a second copy of these neurons, by the name of fc1; the copies follow all other neurons."""
    changed = {}
    mlps = find_mlps(graph) if doubled else {}
    for name, neurons in doubled.items():
        if name not in mlps:
            raise FqvitError(f"doubled: this model has no MLP with GELU whose first layer is {name}. Calibrate it again.")
        fc1, fc2, size = mlps[name].fc1, mlps[name].fc2, len(weight_of(mlps[name].fc1))
        if not neurons or len({*neurons} & {*range(size)}) != len(neurons):
            raise FqvitError(f"doubled: {name}: expected some of the neurons 0 to {size - 1}, each at most once.")
        every = [*range(size), *neurons]
        bias, other = fc1.leaf.bias, fc2.leaf.bias
        assert not isinstance(bias, nn.Module) and not isinstance(other, nn.Module)
        columns = weight_of(fc2)[:, every].clone()
        columns[:, [*neurons, *range(size, len(every))]] /= 2
        rows = with_weight(fc1.leaf, weight_of(fc1)[every], None if bias is None else bias[every])
        changed[name] = dataclasses.replace(fc1, leaf=rows)
        changed[fc2.name] = dataclasses.replace(fc2, leaf=with_weight(fc2.leaf, columns, other))
    return dataclasses.replace(graph, nodes=tuple(changed.get(node.name, node) for node in graph.nodes))


def choose_doubled(graph: Graph, sites: Mapping[str, QParams]) -> dict[str, tuple[int, ...]]:
    """Return the neurons with two copies, by the name of fc1."""
    found = {}
    for name, mlp in find_mlps(graph).items():
        weight = weight_of(mlp.fc2).detach().cpu().double().numpy()
        if mlp.act.name in sites and int(SHARE * weight.shape[1]):
            errors = sites[mlp.act.name].channel_scales(weight.shape[1]) ** 2 * (weight**2).sum(0)
            largest = np.argsort(-errors, kind="stable")[: int(SHARE * weight.shape[1])]
            found[name] = tuple(sorted(largest.tolist()))
    return found


def double_sites(graph: Graph, doubled: Outliers, sites: Mapping[str, QParams]) -> dict[str, QParams]:
    """Return the parameters of all sites with the copies. graph, sites: without them"""
    found = dict(sites)
    mlps = find_mlps(graph) if doubled else {}
    for name, neurons in doubled.items():
        act = mlps[name].act.name
        if len(sites[act].scale) > 1:
            every = [*range(len(sites[act].scale)), *neurons]
            found[act] = dataclasses.replace(sites[act], scale=sites[act].scale[every], zero=sites[act].zero[every])
    return found


def offsets(graph: Graph, doubled: Outliers, sites: Mapping[str, QParams]) -> dict[str, Floats]:
    """Return what to add to the bias [O] of every fc1 with doubled neurons. graph, sites: with the copies"""
    found = {}
    mlps = find_mlps(graph) if doubled else {}
    for name, neurons in doubled.items():
        offset = OFFSET * sites[mlps[name].act.name].channel_scales(len(weight_of(mlps[name].fc1)))
        found[name] = np.zeros(len(offset))
        found[name][list(neurons)] = -offset[list(neurons)]
        found[name][-len(neurons) :] = offset[list(neurons)]
    return found
