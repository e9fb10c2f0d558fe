"""The generic vision transformer: CLIP, SigLIP, DINO, DINOv2, MAE encoders and similar models, like timm's VisionTransformer.

A config chooses the tokens before the patches, the position embeddings, the norms, the MLP and the pooling. The blocks are
always pre-norm: x + attn(norm1(x)), x + mlp(norm2(x)), each branch optionally scaled per channel.
See also: ../config.py (VisionConfig), ../vit.py (ViT and DeiT classifiers, built from leaf modules).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.models.config import VisionConfig
from fqvit.models.families.parts import LayerScale, Mlp, PackedSwiGlu, PatchEmbed, join_heads, split_heads


class Attention(nn.Module):
    """Multi-head attention: [N, T, C] -> [N, T, C]"""

    def __init__(self, c: VisionConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.width, 3 * c.width, bias=c.qkv_bias)
        self.proj = nn.Linear(c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split_heads(self.qkv(x), self.heads)
        return self.proj(join_heads(F.scaled_dot_product_attention(q, k, v)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, c: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(c.width, c.eps)
        self.attn = Attention(c)
        self.ls1 = LayerScale(c.width) if c.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(c.width, c.eps)
        self.mlp = PackedSwiGlu(c.width, c.hidden) if c.swiglu else Mlp(c.width, c.hidden, c.activation)
        self.ls2 = LayerScale(c.width) if c.layer_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class AttentionPool(nn.Module):
    """SigLIP's pooling: one learned query attends to all tokens, followed by an MLP: [N, T, C] -> [N, C]"""

    def __init__(self, c: VisionConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.latent = nn.Parameter(torch.zeros(1, 1, c.width))
        self.q = nn.Linear(c.width, c.width)
        self.kv = nn.Linear(c.width, 2 * c.width)
        self.proj = nn.Linear(c.width, c.width)
        self.norm = nn.LayerNorm(c.width, c.eps)
        self.mlp = Mlp(c.width, c.hidden, c.activation)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q = self.q(self.latent.expand(n, -1, -1)).reshape(n, 1, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x).reshape(n, t, 2, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, 1, width)
        x = self.proj(x)
        x = x + self.mlp(self.norm(x))
        return x[:, 0]


class VisionTransformer(nn.Module):
    """Normalised images [N, channels, height, width] -> logits or features [N, outputs or width].

    With pool "none", the output is the tokens [N, T, C] after the last norm.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        c = self.config = config
        self.patch_embed = PatchEmbed(c.channels, c.patch, c.width, c.patch_bias)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width)) if c.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, c.registers, c.width)) if c.registers else None
        self.pos_embed = nn.Parameter(torch.zeros(1, c.position_count, c.width))
        self.norm_pre = nn.LayerNorm(c.width, c.eps) if c.norm_pre else nn.Identity()
        self.blocks = nn.Sequential(*(Block(c) for _ in range(c.depth)))
        self.norm = nn.LayerNorm(c.width, c.eps) if c.norm else nn.Identity()
        self.attn_pool = AttentionPool(c) if c.pool == "map" else None
        self.fc_norm = nn.LayerNorm(c.width, c.eps) if c.fc_norm else nn.Identity()
        pooled = 2 * c.width if c.pool == "token_avg" else c.width
        self.head = nn.Linear(pooled, c.outputs, bias=c.head_bias) if c.outputs else nn.Identity()

    def embed(self, patches: Tensor) -> Tensor:
        """Prepend the class token and the registers, and add position embeddings: [N, patches, C] -> [N, T, C]"""
        prefix = [token.expand(patches.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        if self.config.prefix_positions:
            return torch.cat([*prefix, patches], 1) + self.pos_embed
        return torch.cat([*prefix, patches + self.pos_embed], 1)

    def pool(self, x: Tensor) -> Tensor:
        """Pool the tokens: [N, T, C] -> [N, C]. "token_avg" gives [N, 2 * C]; "none" returns the tokens unchanged."""
        if self.attn_pool is not None:
            return self.attn_pool(x)  # type: ignore[no-any-return]
        if self.config.pool == "none":
            return x
        if self.config.pool == "token":
            return x[:, 0]
        mean = x[:, self.config.prefix :].mean(1)
        return mean if self.config.pool == "avg" else torch.cat([x[:, 0], mean], 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm_pre(self.embed(self.patch_embed(images)))
        x = self.norm(self.blocks(x))
        return self.head(self.fc_norm(self.pool(x)))  # type: ignore[no-any-return]
