"""Tables of what fqvit supports: families that load from checkpoints, ops of live modules, and parts that capture folds.

`fqvit models` prints these tables. Imports no torch. Tests compare OPS with the handlers of frontend/read.py.
See also: checkpoints/recognise.py (tells families apart), frontend/ (captures modules).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Checkpoints of one family, in any size, which load without timm or transformers."""

    name: str
    layouts: str


FAMILIES = (
    Family("ViT, DeiT, DeiT III", "timm, original, transformers (ViT, DeiT, ViTMSN, IJepa), augreg"),
    Family("Swin", "timm, original, transformers"),
    Family("SwinV2", "timm, original, transformers"),
    Family("CLIP, OpenCLIP", "timm, OpenAI, OpenCLIP, transformers"),
    Family("SigLIP, SigLIP2 of fixed size", "timm, OpenCLIP, transformers"),
    Family("DINO, DINOv2 (also with registers)", "timm, original, transformers"),
    Family("DINOv3 ViT", "timm, original, transformers"),
    Family("MAE encoder", "timm, original, transformers"),
    Family("BEiT, BEiT v2, Data2Vec", "timm, original, transformers"),
)

# ATen ops that live modules may contain, grouped by the kind of op that they become.
OPS = {
    "linear": "linear addmm matmul mm bmm baddbmm einsum conv2d conv_transpose2d",
    "attention": "scaled_dot_product_attention softmax _softmax masked_fill",
    "norm": "layer_norm rms_norm batch_norm group_norm linalg_vector_norm norm pow square rsqrt",
    "activation": (
        "gelu silu sigmoid tanh relu relu6 leaky_relu elu celu selu mish exp abs softplus log_sigmoid hardswish hardsigmoid "
        "hardtanh clamp clamp_min"
    ),
    "elementwise": "add sub rsub neg mul multiply div divide true_divide",
    "pooling": "mean sum amax max_pool2d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d",
    "resampling": "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d",
}
MOVES = "every op that only moves elements: view, permute, slice, cat, roll, index, pad, unfold, ..."

# Parts of a model that need no op of their own, and what they are folded into.
FOLDED = {
    "LayerScale, batch norm": "weights of the layer before or after",
    "mean and std of the pixels": "weights of the first layer",
    "position embeddings, even resampled ones": "constants",
    "rotary tables, relative positions, masks": "constants",
    "constant queries of attention pooling": "constants",
    "scale per head, attention bias": "the scores",
    "Q, K and V of one input": "one linear layer",
    "window partition, cyclic shift": "one gather",
    "dropout, stochastic depth": "nothing: they do nothing in inference",
}
