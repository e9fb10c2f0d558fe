"""Tests of outputs in float graphs: what they compute, which nodes they need, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fqvit.errors import FqvitError
from fqvit.frontend.load import load_model
from fqvit.models.graph import Graph, trace, value_shapes
from fqvit.models.load import FloatModel
from fqvit.models.outputs import available, output_graph, resolve_outputs
from fqvit.models.streams import Streams
from tests.captured import captured
from tests.factories import float_model, one_thread  # noqa: F401

LEAF_BUILT = ("vit", "distilled", "mean", "no class token", "swin", "padded swin")
KINDS = (*LEAF_BUILT, "features", "classifier")


def model_of(kind: str) -> FloatModel:
    return float_model(kind) if kind in LEAF_BUILT else captured(kind)


def size_of(model: FloatModel) -> tuple[int, int, int]:
    p = model.preprocess
    return p.channels, p.height, p.width


def pictures(model: FloatModel, count: int = 3) -> Tensor:
    return torch.randn(count, *size_of(model), generator=torch.Generator().manual_seed(1))


def graph_of(model: FloatModel, *outputs: str) -> Graph:
    return output_graph(model.module, size_of(model), outputs=outputs)


@torch.no_grad()
def values_of(model: FloatModel, images: Tensor) -> dict[str, Tensor]:
    """Return the output of every node of the model's own graph."""
    found: dict[str, Tensor] = {}
    trace(model.module).run(images, lambda node, y: found.setdefault(node.name, y))
    return found


@torch.no_grad()
def run(model: FloatModel, images: Tensor, *outputs: str) -> tuple[Tensor, ...]:
    return graph_of(model, *outputs).run_all(images)


def prefix_of(kind: str) -> int:
    return {"vit": 1, "distilled": 2, "mean": 1, "features": 3, "classifier": 1}.get(kind, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_of_a_model_are_its_blocks(kind: str) -> None:
    model = model_of(kind)
    graph = trace(model.module)
    streams = Streams(graph, value_shapes(graph, size_of(model)))
    blocks = [node.name for node in graph.nodes if node.name.endswith(".add2")]
    assert streams.layers == tuple(blocks) and streams.prefix == prefix_of(kind)
    names, layers = available(model.module, size_of(model))
    assert layers == len(blocks) and ("class" in names) == (prefix_of(kind) > 0)
    assert ("logits" in names) == (kind != "features") and {"embedding", "mean", "tokens"} <= set(names)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_at_a_layer_are_tokens_of_the_residual_stream(kind: str) -> None:
    model = model_of(kind)
    images, prefix = pictures(model), prefix_of(kind)
    known = values_of(model, images)
    stream = [y for name, y in known.items() if name.endswith(".add2")][-1].flatten(1, -2)
    tokens, mean = run(model, images, "tokens@-1", "mean@-1")
    assert torch.equal(tokens, stream[:, prefix:])
    assert torch.allclose(mean, stream[:, prefix:].mean(1), atol=1e-6)
    if prefix:
        (token,) = run(model, images, "class@-1")
        assert torch.equal(token, stream[:, 0])


@pytest.mark.parametrize("kind", ["vit", "distilled", "no class token", "swin", "padded swin", "features", "classifier"])
def test_outputs_without_a_layer_follow_the_last_norm(kind: str) -> None:
    model = model_of(kind)
    images, prefix = pictures(model), prefix_of(kind)
    known = values_of(model, images)
    if "norm" not in known:
        pytest.skip("this model normalises after pooling")
    tokens, mean = run(model, images, "tokens", "mean")
    assert torch.allclose(tokens, known["norm"][:, prefix:], atol=1e-6)
    assert torch.allclose(mean, known["norm"][:, prefix:].mean(1), atol=1e-6)
    if prefix:
        (token,) = run(model, images, "class")
        assert torch.allclose(token, known["norm"][:, 0], atol=1e-6)


def test_a_norm_after_pooling_is_applied_to_vectors_and_not_to_tokens() -> None:
    model = model_of("mean")
    images = pictures(model)
    known = values_of(model, images)
    assert "norm" not in known
    mean, tokens, stream = run(model, images, "mean", "tokens", "tokens@-1")
    assert torch.allclose(mean, known["fc_norm"], atol=1e-5)
    assert torch.equal(tokens, stream)


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedding_is_what_the_classifier_reads(kind: str) -> None:
    model = model_of(kind)
    images = pictures(model)
    graph, known = trace(model.module), values_of(model, images)
    head = graph.node(graph.output)
    wanted = known[graph.output if kind == "features" else head.inputs[0]]
    found = run(model, images, "embedding:u8", "embedding:l2", "embedding:sign")
    assert torch.allclose(found[0], wanted, atol=1e-6)
    assert torch.allclose(found[1], wanted / wanted.norm(dim=-1, keepdim=True), atol=1e-5)
    assert np.array_equal(found[2].numpy(), np.packbits(found[0].numpy() > 0, axis=-1))


def test_l2_normalisation_keeps_the_zero_vector() -> None:
    model = model_of("vit")
    graph = graph_of(model, "embedding:l2")
    leaf = graph.node(graph.output).leaf
    assert torch.equal(leaf(torch.zeros(2, 24)), torch.zeros(2, 24))


def test_outputs_are_in_the_requested_order_and_nothing_else_is_computed() -> None:
    model = model_of("vit")
    graph = graph_of(model, "tokens@0", "class@0")
    assert graph.outputs == ("outputs.tokens@0", "outputs.class@0")
    assert not any(node.name.startswith("blocks.1") or node.name == "head" for node in graph.nodes)
    assert graph_of(model, "class@0", "logits").outputs == ("outputs.class@0", "head")


def test_other_outputs_do_not_change_the_nodes_of_the_classifier() -> None:
    model = model_of("vit")
    own = [(node.name, node.leaf, node.inputs) for node in trace(model.module).nodes]
    nodes = [(node.name, node.leaf, node.inputs) for node in graph_of(model, "logits", "embedding", "tokens").nodes]
    assert nodes[: len(own)] == own and all(name.startswith("outputs.") for name, *_ in nodes[len(own) :])


@pytest.mark.parametrize("kind", KINDS)
def test_output_names_are_resolved_to_their_normal_form(kind: str) -> None:
    model = model_of(kind)
    own = "embedding" if kind == "features" else "logits"
    assert resolve_outputs(model.module, size_of(model), own) == ()
    depth = available(model.module, size_of(model))[1]
    assert resolve_outputs(model.module, size_of(model), "mean@-1") == (f"mean@{depth - 1}",)
    with pytest.raises(FqvitError, match=f"output mean@{depth - 1}: listed twice"):
        resolve_outputs(model.module, size_of(model), f"mean@-1,mean@{depth - 1}")


REFUSED = {
    (
        "features",
        "logits",
    ): "no classifier. It has embedding, class, mean, tokens; class, mean, tokens also at layers @0",
    ("swin", "class"): r"no class token\. It has logits, embedding, mean, tokens; mean, tokens also at layers @0 to @2",
    ("vit", "tokens@2"): "this model has 2 layers, expected @0 to @1, or @-1 for the last",
    ("vit", "tokens@-3"): "this model has 2 layers",
    ("vit", "embedding:i32"): "not from a linear layer",
    ("vit", "class:i32"): "so it has no accumulator. Leave out i32",
}


@pytest.mark.parametrize("kind, output", REFUSED)
def test_an_output_that_the_model_does_not_have_is_refused_with_the_reason(kind: str, output: str) -> None:
    model = model_of(kind)
    with pytest.raises(FqvitError, match=f"^output {output}: .*{REFUSED[kind, output]}"):
        resolve_outputs(model.module, size_of(model), output)


def test_a_model_without_numbered_blocks_has_an_embedding_only() -> None:
    model = captured("hybrid")
    assert available(model.module, size_of(model)) == (("logits", "embedding"), 0)
    with pytest.raises(FqvitError, match=r"no numbered blocks of tokens\. It has logits, embedding\.$"):
        resolve_outputs(model.module, size_of(model), "tokens@0")


class Pooler(nn.Module):
    """A small model with two blocks, mean pooling, a norm, and a last layer that the test chooses."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.patches, self.blocks, self.norm, self.last = (
            nn.Conv2d(3, 8, 4, 4),
            nn.Sequential(Mlp(), Mlp()),
            nn.LayerNorm(8),
            last,
        )

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.blocks(self.patches(images).flatten(2).transpose(1, 2))
        return self.last(self.norm(x.mean(1)))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.nn.functional.gelu(self.a(self.norm(x))))


def loaded(last: nn.Module, **options: Any) -> FloatModel:
    torch.manual_seed(0)
    return load_model(Pooler(last).eval(), 16, **options)


def test_a_last_layer_without_bias_is_a_projection_unless_classes_are_named() -> None:
    torch.manual_seed(0)
    projection = loaded(nn.Linear(8, 6, bias=False))
    assert projection.module.classes is None
    assert available(projection.module, (3, 16, 16)) == (("embedding", "mean", "tokens"), 2)
    assert resolve_outputs(projection.module, (3, 16, 16), "embedding") == ()
    assert resolve_outputs(projection.module, (3, 16, 16), "embedding:i32") == ("embedding:i32",)
    named = loaded(nn.Linear(8, 6, bias=False), classes=list("abcdef"))
    assert named.module.classes == 6 and named.classes == tuple("abcdef")
    assert loaded(nn.Linear(8, 6)).module.classes == 6


def test_blocks_without_attention_are_found_by_their_sums() -> None:
    model = loaded(nn.Identity())
    graph = trace(model.module)
    assert Streams(graph, value_shapes(graph, (3, 16, 16))).layers == ("blocks.0.add1", "blocks.1.add1")
    images = pictures(model)
    own, mean = values_of(model, images)[graph.output], run(model, images, "mean")[0]
    assert torch.allclose(own, mean, atol=1e-6)
