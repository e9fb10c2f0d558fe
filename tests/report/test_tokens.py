"""Patch tokens shown as colours: their layout, their projection to colours, and equal colours for equal tokens."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import fqvit
from fqvit.data.preprocess import Preprocess
from fqvit.models import embedded
from fqvit.quant.fit import site_shapes
from fqvit.report.tokens import TokenLayout, patch_grid, prefix_tokens, token_colours, token_layout

RNG = np.random.default_rng(0)
PIXELS = np.zeros((8, 8, 3), np.uint8)


def preprocess(height: int, width: int) -> Preprocess:
    return Preprocess(height, width, 3, height, "bicubic", (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("tokens", "prefix", "size", "grid"),
    [
        (257, 1, (224, 224), (16, 16)),
        (261, 5, (224, 224), (16, 16)),  # class token and four registers
        (256, 1, (224, 224), None),
        (256, 0, (224, 224), (16, 16)),
        (8, 0, (32, 64), (2, 4)),
        (1, 1, (224, 224), None),
        (7, 0, (224, 224), None),
    ],
)
def test_the_grid_has_the_aspect_ratio_of_the_images(
    tokens: int, prefix: int, size: tuple[int, int], grid: tuple[int, int] | None
) -> None:
    assert patch_grid(tokens, prefix, preprocess(*size)) == grid


def test_equal_tokens_have_equal_colours_and_cosine_1() -> None:
    tokens = RNG.normal(size=(17, 32))
    found = token_colours(TokenLayout("norm", 1, (4, 4)), "a.png", PIXELS, tokens, tokens)
    np.testing.assert_array_equal(found.float_colours, found.integer_colours)
    np.testing.assert_allclose(found.cosines, 1)
    assert found.float_colours.shape == (4, 4, 3) and 0 < found.explained < 1
    assert found.float_colours.min((0, 1)).tolist() == [0, 0, 0] and found.float_colours.max((0, 1)).tolist() == [255] * 3


def test_one_changed_token_changes_its_own_colour_only() -> None:
    tokens = RNG.normal(size=(16, 32))
    changed = tokens.copy()
    changed[6] = -tokens[6]
    found = token_colours(TokenLayout("norm", 0, (4, 4)), "a.png", PIXELS, tokens, changed)
    differing = np.argwhere((found.float_colours != found.integer_colours).any(-1)).tolist()
    assert differing == [[1, 2]] and found.cosines[1, 2] == pytest.approx(-1)


def test_the_norms_of_token_vectors_do_not_affect_their_colours() -> None:
    tokens = RNG.normal(size=(16, 32))
    long = tokens * RNG.uniform(1, 100, (16, 1))
    layout = TokenLayout("norm", 0, (4, 4))
    first, second = (token_colours(layout, "a.png", PIXELS, tokens, other) for other in (tokens, long))
    np.testing.assert_array_equal(first.integer_colours, second.integer_colours)


@pytest.mark.parametrize("tokens", [np.zeros((16, 8)), np.ones((16, 8)), RNG.normal(size=(16, 2))])
def test_tokens_with_fewer_than_three_principal_components_have_colours(tokens: np.ndarray) -> None:
    found = token_colours(TokenLayout("norm", 0, (4, 4)), "a.png", PIXELS, tokens, tokens)
    np.testing.assert_array_equal(found.float_colours, found.integer_colours)
    assert np.isfinite(found.explained) and (found.cosines > 0.999).all()


@pytest.mark.parametrize(
    ("name", "outputs", "site", "prefix", "grid"),
    [
        ("fmnist_vit", ("embedding", "tokens"), "outputs.tokens", 0, (7, 7)),
        ("fmnist_vit", ("embedding",), "blocks.3.add2", 1, (7, 7)),
        ("fmnist_swin", ("embedding",), None, 0, None),
    ],
)
def test_tokens_come_from_an_output_or_from_the_residual_stream(
    name: str, outputs: tuple[str, ...], site: str | None, prefix: int, grid: tuple[int, int] | None
) -> None:
    model = fqvit.load_model(name)
    calibration = fqvit.calibrate(model, embedded.calibration_images()[:4], fqvit.load_recipe("minmax"), outputs=outputs)
    program, graph = fqvit.lower(model, calibration), calibration.graph(model)
    found = token_layout(program, graph, site_shapes(graph, model.preprocess), model.preprocess)
    assert found is not None and prefix_tokens(graph) == (0 if name == "fmnist_swin" else 1)
    if site is None:
        assert found.site.startswith("layers.") and found.grid[0] == found.grid[1]
    else:
        assert found == TokenLayout(site, prefix, grid)  # type: ignore[arg-type]
