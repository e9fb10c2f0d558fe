"""The context of lowering: calibration, preprocessing and facts about the whole graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fqvit.data.preprocess import Preprocess
from fqvit.models import layers
from fqvit.models.general import Shift
from fqvit.models.graph import Graph
from fqvit.models.maps import Grid
from fqvit.quant.calibration import Calibration
from fqvit.quant.fuse_relu import fuse_relus
from fqvit.quant.qparams import QParams

# With 16-bit multipliers, each term of a residual sum has this many bits: the bits of the sum's codes plus fraction bits.
# If the sum has more than 14 bits, its terms still have 2 fraction bits.
SUM_BITS = 16


@dataclass(frozen=True)
class LoweringContext:
    """Everything that a lowering rule may read besides its own node and inputs.

    sums: for every input of a residual sum or embedding, the quantization parameters of that sum
    fused_relus: {linear layer or convolution: the ReLU that is fused into it}
    masked: some attention window is masked, so the last log2 code of every attention site means 0
    resizable: the program can be rebuilt for other image sizes, so it records how its ops depend on the size
    """

    calibration: Calibration
    preprocess: Preprocess
    sums: Mapping[str, QParams] = field(default_factory=dict)
    fused_relus: Mapping[str, str] = field(default_factory=dict)
    masked: bool = False
    resizable: bool = False

    @staticmethod
    def of(graph: Graph, preprocess: Preprocess, calibration: Calibration) -> LoweringContext:
        """Collect the facts about a graph. The calibration must fit it (quant/fit.py)."""
        sums: dict[str, QParams] = {}
        for node in graph.nodes:
            if isinstance(node.leaf, layers.Add | layers.Embed | Shift):
                sums.update(dict.fromkeys(node.inputs, calibration.sites[node.name]))
        return LoweringContext(
            calibration,
            preprocess,
            sums,
            fuse_relus(graph),
            masked=any(isinstance(node.leaf, layers.Softmax) and node.leaf.mask is not None for node in graph.nodes),
            # Only a detector's feature maps, which have Grid leaves, run at every image size with the same weights.
            resizable=any(isinstance(node.leaf, Grid) for node in graph.nodes),
        )

    @property
    def short(self) -> bool:
        """Whether the recipe limits multipliers to 16 bits."""
        return self.calibration.recipe.mult == "short"

    def sum_unit(self, name: str) -> float | None:
        """Return the unit of term `name` of a residual sum if multipliers have 16 bits, otherwise None.

        It is the sum's scale divided by a power of two, so that one shift serves both terms.
        """
        if not self.short or name not in self.sums:
            return None
        q = self.sums[name]
        return float(q.scale[0]) / 2.0 ** max(SUM_BITS - q.bits, 2)
