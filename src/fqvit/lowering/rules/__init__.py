"""Lowering rules: one per leaf module, listed in RULES.

See also: base.py (the interface of rules), layers.py (embeddings, linear layers, norms, sums and moves), attention.py,
maps.py (detectors), general.py (captured graphs).
"""

from __future__ import annotations

from fqvit.errors import FqvitError
from fqvit.lowering.emit import LoweredValue
from fqvit.lowering.rules import attention, general, layers, maps
from fqvit.lowering.rules.base import Lowering, Rule
from fqvit.models.layers import Leaf

RULES: dict[type[Leaf], Rule] = {**layers.RULES, **attention.RULES, **maps.RULES, **general.RULES}


def lower_node(low: Lowering) -> LoweredValue:
    """Emit the ops of one node with the rule of its leaf module."""
    leaf = low.node.leaf
    rule = RULES.get(type(leaf))
    if rule is None:
        raise FqvitError(f"{low.name}: no lowering rule for {type(leaf).__name__}.")
    return rule(leaf, low)
