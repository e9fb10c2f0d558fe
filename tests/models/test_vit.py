"""The ViT module. Equality with timm is tested in test_parity.py."""

from __future__ import annotations

import pytest
import torch

from fqvit.models.config import ViTConfig
from fqvit.models.graph import trace
from fqvit.models.layers import Leaf
from fqvit.models.vit import ViT

SMALL = ViTConfig(image=(16, 16), patch=4, channels=3, classes=5, width=12, depth=2, heads=3, hidden=24)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("size", [(16, 16), (8, 20)])
def test_logits_have_one_row_per_image(prefix: int, size: tuple[int, int]) -> None:
    pool = "mean" if prefix == 0 else "token"
    c = ViTConfig(**{**vars(SMALL), "prefix": prefix, "pool": pool, "image": size})
    assert ViT(c)(torch.randn(2, 3, *size)).shape == (2, 5)


def test_the_traced_graph_equals_the_module() -> None:
    torch.manual_seed(0)
    model, images = ViT(SMALL).eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(trace(model).run(images), model(images))


def test_all_parameters_except_tokens_and_position_embeddings_belong_to_leaves() -> None:
    model = ViT(SMALL)
    inside = {f"{name}.{p}" for name, m in model.named_modules() if isinstance(m, Leaf) for p, _ in m.named_parameters()}
    assert {name for name, _ in model.named_parameters()} - inside == {"cls_token", "pos_embed"}


def test_mean_pooling_excludes_the_prefix_tokens() -> None:
    torch.manual_seed(0)
    model = ViT(ViTConfig(**{**vars(SMALL), "pool": "mean"})).eval()
    images = torch.randn(1, 3, 16, 16)
    graph = trace(model)
    tokens, pooled = trace(model, "tokens").run(images), trace(model, "pooled").run(images)
    assert torch.allclose(pooled, tokens[:, 1:].mean(1), atol=1e-6)
    assert graph.output == "head"
