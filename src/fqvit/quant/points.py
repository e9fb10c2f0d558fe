"""Find the node whose output gives the range of each site. See also: calibrate.py, methods/reparameterize.py."""

from __future__ import annotations

from collections import Counter

from fqvit.models.graph import Graph
from fqvit.models.layers import Take


def observation_points(graph: Graph) -> dict[str, str]:
    """Return {node: the site observed at its output}.

    Every site is observed at the node of the same name, except the norm before the selection of the class token: it is observed
    after the selection, because its range need not cover the other tokens.
    """
    points = {node.name: node.name for node in graph.nodes}
    readers = Counter(name for node in graph.nodes for name in node.inputs)
    for node in graph.nodes:
        if isinstance(node.leaf, Take) and node.leaf.join and node.leaf.index.ndim == 1:
            (site,) = node.inputs
            if site not in graph.outputs and readers[site] == 1 and graph.node(site).leaf.role == "norm":
                del points[site]
                points[node.name] = site
    return points
