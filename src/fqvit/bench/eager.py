"""Run a float model as fast as PyTorch can: fused attention, and index_select for gathers.

Values equal those of the plain model up to rounding. The leaf modules of fqvit.models are written for tracing; comparing with
them would flatter the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.models.config import BeitConfig, DinoV3Config, SwinConfig, SwinV2Config, VisionConfig, ViTConfig
from fqvit.models.families.build import FamilyConfig, build_family
from fqvit.models.layers import Take
from fqvit.models.load import build
from fqvit.models.swin import WindowAttention
from fqvit.models.vit import Attention

Config = ViTConfig | SwinConfig | FamilyConfig
CONFIGS: dict[str, type[Config]] = {
    kind.__name__: kind for kind in (ViTConfig, SwinConfig, VisionConfig, DinoV3Config, BeitConfig, SwinV2Config)
}


def read(file: str) -> nn.Module:
    """Load the model that prepare.py saved, with weights mapped from the file.

    Weights are not initialized first, so that peak memory is that of a process that only runs the model. Meta tensors would
    avoid the initialization, too, but cost 36 MB of imports.
    """
    saved = torch.load(file, mmap=True, weights_only=True)
    sizes = CONFIGS[saved["kind"]](**saved["config"])
    own = {name: getattr(nn.init, name) for name in ("trunc_normal_", "kaiming_uniform_", "uniform_")}
    for name in own:
        setattr(nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        module = build(sizes) if isinstance(sizes, ViTConfig | SwinConfig) else build_family(sizes)
    finally:
        for name, function in own.items():
            setattr(nn.init, name, function)
    module.load_state_dict(saved["state"], assign=True)
    return module.eval()


def quicken(module: nn.Module) -> nn.Module:
    """Replace the forward functions of attention and gather modules in place. The module can no longer be traced or saved."""
    for part in module.modules():
        faster: Callable[[Tensor], Tensor] | None = None
        if isinstance(part, Attention):
            faster = _attention(part)
        elif isinstance(part, WindowAttention):
            faster = _window_attention(part)
        elif isinstance(part, Take) and not bool((part.index < 0).any()):
            faster = _take(part)
        if faster is not None:
            part.forward = faster
    return module


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split [..., T, 3 * H * D] into Q, K and V, each [..., H, T, D]."""
    return qkv.reshape(*qkv.shape[:-1], 3, heads, -1).movedim(-3, 0).transpose(-2, -3).unbind(0)


def _attention(part: Attention) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        q, k, v = _split(part.qkv(x), part.q.heads)
        y = F.scaled_dot_product_attention(q, k, v)
        return part.proj(y.transpose(-2, -3).flatten(-2))  # type: ignore[no-any-return]

    return forward


def _window_attention(part: WindowAttention) -> Callable[[Tensor], Tensor]:
    with torch.no_grad():
        bias = part.relative_position_bias_table[part.scores.index].permute(2, 0, 1)[None]
        if part.softmax.mask is not None:
            bias = bias.masked_fill(~part.softmax.mask[:, None], float("-inf"))
    bias = bias.expand(len(part.windows.index), -1, -1, -1).contiguous()  # [W, H, T, T]
    repeated: dict[int, Tensor] = {}  # batch size -> bias; filled in the first run, which counts as loading

    def forward(x: Tensor) -> Tensor:
        images = len(x)
        if images not in repeated:
            repeated[images] = bias.repeat(images, 1, 1, 1)
        q, k, v = _split(part.qkv(part.windows(x)).flatten(0, 1), part.q.heads)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=repeated[images])
        y = y.transpose(-2, -3).reshape(images, len(bias), *y.shape[2:3], -1)
        return part.proj(part.tokens(y))  # type: ignore[no-any-return]

    return forward


def _take(part: Take) -> Callable[[Tensor], Tensor]:
    rows, shape = part.index.flatten(), part.index.shape

    def forward(x: Tensor) -> Tensor:
        y = x.flatten(1, -2).index_select(1, rows).view(len(x), *shape, -1)
        return y.flatten(-2) if part.join else y

    return forward
