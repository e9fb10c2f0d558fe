"""Tests of capture as a whole: outputs, batches, no changes to the module, and parity with families of timm."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fqvit.frontend.capture import capture, check
from fqvit.frontend.load import load_model
from fqvit.lowering.lower import lower
from fqvit.models.pixels import normalise
from fqvit.runtime.native import Engine
from fqvit.runtime.reference import Reference
from tests.captured import captured as captured_model
from tests.factories import calibration_of, images_for
from tests.frontend.parity import SIZE, Tokens, captured, randomised


def test_all_float_outputs_are_returned_in_order_and_integer_outputs_are_dropped() -> None:
    model = Tokens(lambda x: {"tokens": F.gelu(x), "count": torch.tensor(3), "none": None, "pooled": [x.mean(1), x.amax(1)]})
    graph = capture(randomised(model), SIZE).graph
    images = torch.randn(2, *SIZE)
    *others, last = graph.run_all(images)
    wanted = model(images)
    for have, want in zip((last, *others), (wanted["tokens"], *wanted["pooled"]), strict=True):
        torch.testing.assert_close(have.reshape(want.shape), want)


def test_a_graph_captured_with_one_image_runs_batches() -> None:
    graph = captured(Tokens(lambda x: F.gelu(x).flip(1).mean(1)))
    images = torch.randn(5, *SIZE)
    together = graph(images)
    for i in range(5):
        torch.testing.assert_close(graph(images[i : i + 1])[0], together[i])


def test_parity_compares_the_graph_with_the_module_itself() -> None:
    """A graph of plain layers runs the same ops as the module in the same order, so the difference may be exactly 0."""
    module = randomised(Tokens(lambda x: x.mean(1), head=nn.Linear(8, 4)))
    module.body = lambda x, layers: layers["head"](x.mean(1))  # type: ignore[assignment]
    graph = capture(module, SIZE)
    before = check(module, graph, SIZE)
    with torch.no_grad():
        graph.graph.node(graph.graph.output).leaf.bias[0] += 1e-3
    assert before < 1e-6 < 1e-5 < check(module, graph, SIZE)


class TwoHeads(nn.Module):
    """Return the mean of two classifiers, the output of each (as in a distilled DeiT), and the tokens. There is no MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens = self.norm(self.patches(images).flatten(2).transpose(1, 2))
        first, second = self.first(tokens[:, 0]), self.second(tokens[:, 1])
        return (first + second) / 2, first, second, tokens


def test_a_program_has_the_same_outputs_as_the_module_in_the_same_order() -> None:
    torch.manual_seed(0)
    module = TwoHeads().eval()
    model = load_model(module, 16)
    program = lower(model, calibration_of(model, "fqvit", count=4))
    images = images_for(model.preprocess, 4, 7)  # the calibration images, so that no value is clipped
    have = Engine(program, 1).run_all(images)
    with torch.no_grad():
        wanted = module(normalise(images, model.preprocess))
    assert len(have) == 4
    for codes, output, x in zip(have, program.header.outputs, wanted, strict=True):
        alpha = 0 if output.alpha is None else program.constants[output.alpha].astype(np.int64)
        values = (codes.astype(np.float64) - output.zero) * output.scale * 2.0**alpha
        assert np.abs(values - x.numpy()).max() < 0.05 * x.abs().max()
    for a, b in zip(have, Reference(program).run_all(images), strict=True):
        assert np.array_equal(a, b)


def test_the_module_is_not_modified() -> None:
    model = randomised(Tokens(F.gelu)).train().double()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    capture(model, SIZE)
    assert model.training and next(model.parameters()).dtype == torch.float64
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_weights_of_a_checkpoint_are_in_memory_once() -> None:
    model = captured_model("classifier")
    assert model.original is not None
    shared = {weight.data_ptr() for weight in model.original.parameters()}
    sizes = [(weight.numel(), weight.data_ptr() in shared) for weight in model.module.parameters()]
    assert sum(size for size, is_shared in sizes if is_shared) > 0.9 * sum(size for size, _ in sizes)


def test_the_weights_of_a_live_module_are_copied_not_shared() -> None:
    model = captured_model("hybrid")
    assert model.original is not None
    shared = {weight.data_ptr() for weight in model.original.parameters()}
    assert not any(weight.data_ptr() in shared for weight in model.module.parameters())


def test_greyscale_images_that_are_not_square_are_captured() -> None:
    class Grey(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 4, 3, 2, 1)

        def forward(self, images: Tensor) -> Tensor:
            return F.gelu(self.conv(images)).mean((2, 3))

    captured(Grey(), (1, 6, 10))


def test_names_of_nodes_are_paths_of_modules() -> None:
    model = Tokens(lambda x: x, fc1=nn.Linear(8, 16), act=nn.GELU(), fc2=nn.Linear(16, 8), norm=nn.LayerNorm(8))
    model.body = lambda x, layers: x + layers["fc2"](layers["act"](layers["fc1"](layers["norm"](x))))
    names = [node.name for node in captured(model).graph.nodes]
    assert names[:-1] == ["patches", "layers.norm", "layers.fc1", "layers.act", "layers.fc2"]


FAMILIES: list[tuple[str, dict[str, Any], int]] = [
    ("vit_tiny_patch16_224", {"img_size": 64, "depth": 2}, 64),
    ("vit_small_patch14_reg4_dinov2", {"img_size": 70, "depth": 2}, 70),
    ("eva02_tiny_patch14_224", {"img_size": 70, "depth": 2}, 70),
    ("beit_base_patch16_224", {"img_size": 64, "depth": 1, "embed_dim": 96, "num_heads": 3}, 64),
    ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": (2, 2), "embed_dim": 48, "num_heads": (2, 4)}, 56),
    ("swinv2_tiny_window8_256", {"img_size": 64, "depths": (2, 1), "embed_dim": 48, "num_heads": (2, 4)}, 64),
    ("cait_xxs24_224", {"img_size": 64, "depth": 2}, 64),
    ("vit_relpos_small_patch16_224", {"img_size": 64, "depth": 2}, 64),
    ("levit_128s", {"img_size": 128}, 128),
    ("mobilevit_xxs", {}, 64),
    ("xcit_nano_12_p16_224", {"img_size": 64, "depth": 2}, 64),
    ("pvt_v2_b0", {"depths": (1, 1, 1, 1)}, 64),
    ("efficientformerv2_s0", {"img_size": 64, "depths": (1, 1, 2, 4)}, 64),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options", "side"), FAMILIES, ids=[name for name, _, _ in FAMILIES])
def test_families_of_timm_are_captured_up_to_rounding(timm: ModuleType, name: str, options: dict[str, Any], side: int) -> None:
    torch.manual_seed(0)
    module = timm.create_model(name, **options).eval()
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    size = (3, side, side)
    assert check(module, capture(module, size), size) < 1e-5
