"""Every figure is well-formed SVG, has a description and escapes names from files, even at unusual sizes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from fqvit.evaluate.compare import SiteNoise
from fqvit.report import maps, plots
from fqvit.report.data import BINS, FINE, OCTAVES, AttentionCounts, AttentionMaps, ChannelRanges, QuantizedMap, exp_curves
from fqvit.report.predictions import ClassChange
from fqvit.report.svg import Axis, label, standalone

BAD = "<script>\"'&\x07</script>"


def parsed(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(standalone(svg).partition("\n")[2])
    assert root.get("role") == "img" and root.get("aria-label")
    assert not [tag for tag in root.iter() if tag.tag.endswith("script")]
    return root


def ranges(channels: int, name: str = "norm") -> ChannelRanges:
    rng = np.random.default_rng(channels)
    return ChannelRanges(name, -rng.gamma(1, 1, channels), rng.gamma(1, 3, channels))


def counts(*filled: int) -> AttentionCounts:
    fine, bins = np.zeros(FINE * OCTAVES + 1, np.int64), np.zeros(BINS, np.int64)
    for index in filled:
        fine[index], bins[index % BINS] = 5, 5
    return AttentionCounts(fine, bins, bins, bins, 1)


@pytest.mark.parametrize("channels", [1, 2, 192])
def test_channel_ranges_are_drawn(channels: int) -> None:
    parsed(plots.channel_ranges(ranges(channels, BAD)))


@pytest.mark.parametrize("norms", [1, 25, 60])
def test_norm_boxes_are_drawn(norms: int) -> None:
    dead = ChannelRanges("dead", np.zeros(4), np.zeros(4))
    parsed(plots.norm_boxes([*(ranges(30, f"blocks.{i}.norm1") for i in range(norms)), dead]))


def test_norm_boxes_of_constant_channels_are_drawn() -> None:
    still = ChannelRanges("norm", np.ones(4), np.ones(4))
    parsed(plots.norm_boxes([still, still]))
    parsed(plots.norm_boxes([still, ranges(4)]))


@pytest.mark.parametrize("models", [1, 3, 11])
def test_model_boxes_have_a_box_and_a_ratio_per_model(models: int) -> None:
    found = [(f"{BAD}{i}", ranges(40 + i)) for i in range(models)]
    root = parsed(plots.model_boxes(found, 100))
    assert sum(shape.get("class") == "box" for shape in root.iter()) == models
    texts = [text.text or "" for text in root.iter() if text.tag.endswith("text")]
    assert sum(text.endswith("×") for text in texts) == models


def test_model_boxes_of_constant_channels_are_drawn() -> None:
    still = ChannelRanges("norm", np.ones(4), np.ones(4))
    parsed(plots.model_boxes([("still", still)], 1))
    parsed(plots.model_boxes([("still", still), ("moving", ranges(4))], 1))


@pytest.mark.parametrize("filled", [(), (0,), (95,), (3, 20, 40, FINE * OCTAVES)])
def test_attention_values_are_drawn(filled: tuple[int, ...]) -> None:
    parsed(plots.attention_values(counts(*filled)))


def test_exponentials_are_drawn_with_their_error() -> None:
    assert "1.91e-03" in plots.exponentials(exp_curves(0.1))
    parsed(plots.exponentials(exp_curves(0.1)))


def test_site_errors_are_drawn_for_sites_without_noise_and_with_hostile_names() -> None:
    rows = [SiteNoise("<b>", "norm", 8, None, None, None), SiteNoise(f"blocks.0.{BAD[:8]}", "norm", 8, -3.0, -3.0, 40.0)]
    parsed(plots.site_errors(rows))
    parsed(plots.site_errors(rows[:1]))


def test_class_changes_show_the_largest_losses_and_gains() -> None:
    rows = [(ClassChange(i, 10, 5, 5 + i % 11 - 5), f"<i>{i}</i>") for i in range(100)]
    root = parsed(plots.class_changes(rows))
    texts = [text.text for text in root.iter() if text.tag.endswith("text")]
    assert sum(text == "−50.0" for text in texts) == 10 and sum(text == "+50.0" for text in texts) == 9
    assert plots.class_changes([(ClassChange(0, 3, 1, 1), "same")]) == ""


@pytest.mark.parametrize("shape", [(28, 28, 1), (30, 60, 3)])
def test_maps_are_drawn_over_their_image(shape: tuple[int, int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    float_map = np.random.default_rng(1).random((4, 6), np.float32)
    stored = [QuantizedMap(method, 4, float_map, 10.0) for method in ("uniform", "log2", "relative")]
    svg = maps.attention_maps(AttentionMaps("site", "received", pixels, float_map, stored))
    images = [image for image in parsed(svg).iter() if image.tag.endswith("image")]
    assert len(images) == 6 and all(image.get("href", "").startswith("data:image/jpeg;base64,") for image in images)


def test_a_patch_with_more_attention_is_brighter() -> None:
    weights = np.array([[0.0, 0.2, 1.0]], np.float32)
    found = maps.overlay(np.zeros((30, 30, 3), np.uint8), weights, 1.0).astype(int).sum(-1).mean(0)
    a, b, c = found[20], found[80], found[150]
    assert a < b < c


def test_maps_without_attention_are_dark() -> None:
    assert maps.overlay(np.zeros((8, 8, 1), np.uint8), np.zeros((2, 2), np.float32), 0.0).max() < 10


def test_a_standalone_file_has_a_size_and_colours() -> None:
    svg = standalone(plots.norm_boxes([ranges(4)]))
    head = svg.partition("\n")[2].partition(">")[0]
    assert 'width="760" height="360"' in head and "--accent" in svg


def test_ticks_are_round_numbers_inside_the_axis() -> None:
    assert Axis(0, 100, 0, 1).ticks() == [0, 20, 40, 60, 80, 100]
    assert Axis(-3.1, 2.2, 0, 1).ticks() == [-3, -2, -1, 0, 1, 2]
    assert Axis(0.9, 120, 0, 1, log=True).ticks() == [1, 2, 5, 10, 20, 50, 100]
    assert Axis(1e-4, 1e3, 0, 1, log=True).ticks() == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100, 1000])
    assert [label(value) for value in (-0.5, 0, 12000)] == ["−0.5", "0", "12,000"]
