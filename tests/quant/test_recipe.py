"""Recipes: the named ones, TOML files, bounds of fields, and bit widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fqvit.errors import FqvitError
from fqvit.quant.recipe import DEFAULT_RECIPE, RECIPES, Recipe, SiteRule, detector_recipe, load_recipe, with_bits, with_methods


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


OURS = ["fqvit", "w6a6", "w4", "w4a4", "fast", "embedding", "npu", "auto"]


def test_the_named_recipes_have_their_documented_order_and_settings() -> None:
    baselines, paper = ["minmax", "ema", "percentile", "omse"], ["fq-vit", "fq-vit-8", "fq-vit-original"]
    floating = ["partial", "bit-split", "ptq-vit", "ptq4vit", "repq-vit"]
    assert list(RECIPES) == [*OURS, *paper, *baselines, *floating] and DEFAULT_RECIPE == "fqvit"
    assert [name for name, r in RECIPES.items() if not r.integer] == floating
    bits = {name: (r.weight_bits, r.activation_bits, r.attention_bits) for name, r in RECIPES.items()}
    assert (
        bits["fqvit"] == bits["embedding"] == bits["auto"] == bits["fq-vit"] == bits["fq-vit-original"] == (8, 8, 4)
        and (bits["w6a6"], bits["w4"], bits["w4a4"]) == ((6, 6, 4), (4, 8, 4), (4, 4, 4))
        and bits["fast"] == (7, 8, 4)
    )
    assert {bits[name] for name in ["fq-vit-8", *baselines, *floating]} == {(8, 8, 8)}
    assert [name for name, r in RECIPES.items() if r.residual == "ptf"] == ["npu", *paper]
    assert [name for name, r in RECIPES.items() if r.log2_attention] == ["fq-vit", "fq-vit-original"]
    assert [name for name, r in RECIPES.items() if r.channels] == OURS
    assert [name for name, r in RECIPES.items() if r.attention == "relative"] == OURS
    assert [name for name, r in RECIPES.items() if r.rounding == "compensated"] == ["auto"]
    assert [name for name, r in RECIPES.items() if r.rounding == "weighted"] == ["fqvit", "fast", "embedding", "npu"]
    assert [name for name, r in RECIPES.items() if r.rounding == "reconstructed"] == ["w6a6", "w4", "w4a4"]
    assert [name for name, r in RECIPES.items() if r.ranges == "least-error"] == ["w6a6", "w4", "w4a4"]
    assert [name for name, r in RECIPES.items() if r.gelu == "spaced"] == ["w6a6", "w4a4"]
    assert [name for name, r in RECIPES.items() if r.max_loss is not None] == ["auto"]
    assert [name for name, r in RECIPES.items() if r.branches == "codes" or r.last_batch] == ["fq-vit-original"]
    assert [name for name, r in RECIPES.items() if r.logits == "codes" or r.weight_ends == "halves"] == ["fq-vit-original"]
    assert {name: r.shuffle for name, r in RECIPES.items() if r.shuffle is not None} == {"fq-vit-original": 0}
    assert RECIPES["fq-vit-original"].momentum == 0.01 and RECIPES["fq-vit-original"].last_batch
    assert {name: r.position_bits for name, r in RECIPES.items() if r.position_bits != 16} == {"fq-vit-original": 8}
    new = ("levels", "keys", "scores", "values", "gelu_floor", "extremes")
    assert {
        n: [getattr(r, f) for f in new]
        for n, r in RECIPES.items()
        if n == "embedding" or any(getattr(r, f) != getattr(RECIPES["fq-vit"], f) for f in new)
    } == {
        **{n: ["curve-below-8", "plain", "attended", "widened", 0.9, "balanced"] for n in ("fqvit", "fast", "auto")},
        "w6a6": ["curve", "leveled", "attended", "observed", 0.0, "observed"],
        "w4": ["curve", "leveled", "attended", "widened", 0.9, "observed"],
        "w4a4": ["curve", "leveled", "attended", "observed", 0.0, "observed"],
        "embedding": ["curve", "leveled", "attended", "widened", 0.9, "observed"],
        "npu": ["powers", "plain", "attended", "widened", 0.0, "balanced"],
    }
    assert [name for name, r in RECIPES.items() if r.symmetric] == ["npu", "ptq-vit"]
    assert [name for name, r in RECIPES.items() if r.mult == "short"] == ["npu"] and all(r.zero_code for r in RECIPES.values())


@pytest.mark.parametrize("name", RECIPES)
def test_named_recipes_are_loaded_by_name_and_survive_a_json_round_trip(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe is RECIPES[name]
    assert msgspec.convert(msgspec.to_builtins(recipe), Recipe) == recipe


def test_default_values_are_not_written() -> None:
    """Otherwise a new field would change files that do not use it."""
    assert msgspec.to_builtins(RECIPES["fq-vit"]) == {"name": "fq-vit"}
    assert msgspec.to_builtins(RECIPES["fqvit"])["sites"] == {"residual": {"bits": 16}, "hidden": {"bits": 10}}


def test_the_named_recipes_keep_the_values_that_were_measured() -> None:
    """The accuracies in the documentation were measured with these values."""
    assert {recipe.batch for name, recipe in RECIPES.items() if name != "fq-vit-original"} == {16}
    assert (RECIPES["fq-vit-original"].batch, RECIPES["fq-vit-original"].shuffle) == (100, 0)
    assert [(rule, RECIPES["fqvit"].sites[rule].bits) for rule in RECIPES["fqvit"].sites] == [("residual", 16), ("hidden", 10)]
    assert {name: recipe.images for name, recipe in RECIPES.items() if recipe.images != 1000} == {"ptq4vit": 32, "repq-vit": 32}
    assert {name: r.weight_bits for name, r in RECIPES.items() if r.weight_bits != 8} == {
        "w6a6": 6,
        "w4": 4,
        "w4a4": 4,
        "fast": 7,
    }
    assert {name: r.weight_group for name, r in RECIPES.items() if r.weight_group} == {"w4": 8, "w4a4": 16, "auto": 16}
    assert {name: r.k for name, r in RECIPES.items() if r.k != 3} == dict.fromkeys(OURS, 4)
    assert RECIPES["auto"].max_loss == 0.5 and RECIPES["ema"].momentum == 0.01 and RECIPES["percentile"].quantile == 0.99999


def test_an_empty_file_gives_the_recipe_of_the_paper_named_after_the_file(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, "")) == msgspec.structs.replace(RECIPES["fq-vit"], name="mine")


def test_a_file_starts_from_its_base_and_changes_fields(tmp_path: Path) -> None:
    text = """
    base = "percentile"
    weight_bits = 4
    momentum = 1
    images = 64
    [sites."blocks.*.mlp.act"]
    bits = 6
    range = [-1, 4.5]
    [sites.residual]
    observer = "ptf"
    k = 5
    """
    recipe = load_recipe(str(written(tmp_path, text)))
    assert recipe == msgspec.structs.replace(
        RECIPES["percentile"],
        name="mine",
        weight_bits=4,
        momentum=1.0,
        images=64,
        sites={"blocks.*.mlp.act": SiteRule(bits=6, range=(-1.0, 4.5)), "residual": SiteRule(observer="ptf", k=5)},
    )


def test_a_file_may_set_its_name(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, 'name = "other"')).name == "other"


MALFORMED = {
    "an unknown field": ("weigth_bits = 4", "unknown field weigth_bits"),
    "a wrong type": ('weight_bits = "four"', r"Expected int, got str.*weight_bits"),
    "a float where an integer belongs": ("images = 1.5", "Expected int, got float.*images"),
    "too many bits": ("weight_bits = 9", "<= 8.*weight_bits"),
    "a group of 7": ("weight_bits = 4\nweight_group = 7", "weight_group 7 must be 0 or 8 to 256"),
    "a group of 257": ("weight_group = 257", "<= 256.*weight_group"),
    "a negative group": ("weight_group = -8", ">= 0.*weight_group"),
    "a group of 1": ("weight_bits = 4\nweight_group = 1", "weight_group 1 must be 0 or 8 to 256"),
    "one bit": ("activation_bits = 1", ">= 2.*activation_bits"),
    "a momentum of 0": ("momentum = 0.0", "momentum"),
    "a momentum above 1": ("momentum = 1.01", "momentum"),
    "a momentum of NaN": ("momentum = nan", "momentum"),
    "a quantile of a half": ("quantile = 0.5", "quantile"),
    "a quantile above 1": ("quantile = 1.01", "quantile"),
    "no images": ("images = 0", ">= 1.*images"),
    "a batch of 0": ("batch = 0", ">= 1.*batch"),
    "a batch of 1025": ("batch = 1025", "<= 1024.*batch"),
    "a negative seed": ("shuffle = -1", ">= 0.*shuffle"),
    "a shuffle that is not a seed": ("shuffle = true", "shuffle"),
    "K of 9": ("k = 9", "<= 8.*k"),
    "K of -1": ("k = -1", ">= 0.*k"),
    "K of 9 at a site": ("[sites.residual]\nk = 9", "<= 8.*sites"),
    "K of -1 at a site": ("[sites.residual]\nk = -1", ">= 0.*sites"),
    "an unknown observer": ('observer = "median"', "observer"),
    "an unknown field of a site": ("[sites.qkv]\nbit = 4", "unknown field bit"),
    "a rule that is not a table": ("sites.qkv = 4", "Expected object, got int.*sites"),
    "a range of three numbers": ("[sites.qkv]\nrange = [0, 1, 2]", "range"),
    "a range with NaN": ("[sites.qkv]\nrange = [nan, 1.0]", "range"),
    "a range to infinity": ("[sites.qkv]\nrange = [0.0, inf]", "range"),
    "a range from minus infinity": ("[sites.qkv]\nrange = [-inf, 1.0]", "range"),
    "an empty range": ("[sites.qkv]\nrange = [0.0, 0.0]", "range"),
    "a reversed range": ("[sites.qkv]\nrange = [2.0, 1.0]", "range"),
    "a site of 17 bits": ("[sites.residual]\nbits = 17", "<= 16.*sites"),
    "a site of one bit": ("[sites.residual]\nbits = 1", ">= 2.*sites"),
    "a negative loss": ("max_loss = -0.1", ">= 0.*max_loss"),
    "a loss above 100": ("max_loss = 101", "<= 100.*max_loss"),
    "a loss of NaN": ("max_loss = nan", "max_loss"),
    "an unknown rounding": ('rounding = "up"', "rounding"),
    "an unknown attention": ('attention = "linear"', "attention"),
    "channels as text": ('channels = "yes"', "channels"),
    "position embeddings with 4 bits": ("position_bits = 4", "position_bits"),
    "an unknown base": ('base = "fq-vti"', "base 'fq-vti' is not a recipe"),
    "a base that is a number": ("base = 3", "base 3 is not a recipe"),
    "a base that is a list": ('base = ["fq-vit"]', "base .* is not a recipe"),
    "not TOML": ("weight_bits 4", "not a TOML file"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_give_a_one_line_error_with_the_file_name(case: str, tmp_path: Path) -> None:
    text, message = MALFORMED[case]
    path = written(tmp_path, text)
    with pytest.raises(FqvitError, match=message) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


BOUNDS: dict[str, tuple[Any, ...]] = {
    "weight_bits": (2, 8),
    "activation_bits": (2, 8),
    "attention_bits": (2, 8),
    "weight_group": (0, 8, 256),
    "k": (0, 8),
    "momentum": (0.001, 1.0),
    "quantile": (0.51, 1.0),
    "images": (1, 10**6),
    "shuffle": (0,),
    "batch": (1, 1024),
    "max_loss": (0.0, 100.0),
}


@pytest.mark.parametrize("field", BOUNDS)
def test_a_file_may_set_a_field_to_its_bounds(field: str, tmp_path: Path) -> None:
    for value in BOUNDS[field]:
        assert getattr(load_recipe(written(tmp_path, f"{field} = {value}")), field) == value


def test_a_site_rule_may_set_fields_to_their_bounds(tmp_path: Path) -> None:
    for bits, k, ends in ((2, 0, (-2.0, 0.0)), (16, 8, (0.0, 2.0))):
        recipe = load_recipe(written(tmp_path, f"[sites.residual]\nbits = {bits}\nk = {k}\nrange = {list(ends)}"))
        assert recipe.sites == {"residual": SiteRule(bits=bits, k=k, range=ends)}


def test_recipes_are_immutable() -> None:
    """Named recipes are shared by all callers."""
    with pytest.raises(AttributeError):
        RECIPES["fqvit"].k = 2  # type: ignore[misc]
    with pytest.raises(AttributeError):
        RECIPES["fqvit"].sites["residual"].bits = 8  # type: ignore[misc]


def test_a_binary_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FqvitError, match=r"mine\.toml: not a TOML file"):
        load_recipe(path)


def test_missing_files_and_folders_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match=r"nothing\.toml: cannot be read"):
        load_recipe(tmp_path / "nothing.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(FqvitError, match="cannot be read"):
        load_recipe(tmp_path / "folder.toml")


def test_the_error_for_an_unknown_name_lists_the_known_names() -> None:
    with pytest.raises(FqvitError, match="recipe 'fq_vit': no such recipe. Use one of fqvit, w6a6, w4, w4a4, fast,"):
        load_recipe("fq_vit")


def test_with_bits_sets_all_three_widths() -> None:
    recipe = with_bits(RECIPES["fq-vit"], "4/6/3")
    assert (recipe.weight_bits, recipe.activation_bits, recipe.attention_bits) == (4, 6, 3) and recipe.log2_attention
    assert not with_bits(RECIPES["fq-vit"], "8/8/8").log2_attention
    assert not with_bits(RECIPES["fq-vit"], "8/8/5").log2_attention
    assert not with_bits(RECIPES["minmax"], "8/8/4").log2_attention


def test_with_bits_keeps_an_unused_weight_group(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, "weight_bits = 4\nweight_group = 32"))
    assert (recipe.weight_bits, recipe.weight_group) == (4, 32)
    assert with_bits(recipe, "8/8/4") == Recipe(name=recipe.name, weight_group=32)


@pytest.mark.parametrize("bits", ["", "8", "8/8", "8/8/4/4", "8/8/9", "1/8/4", "8-8-4", "8/8/4 ", "8/8/４", "w/a/t", "8/8/4\n"])
def test_with_bits_rejects_other_formats(bits: str) -> None:
    with pytest.raises(FqvitError, match="expected W/A/ATTN"):
        with_bits(RECIPES["fq-vit"], bits)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bits", ["8/8/8", "4/8/4", "8/6/3"])
def test_with_bits_changes_no_other_field(name: str, bits: str) -> None:
    recipe = RECIPES[name]
    weight, activation, attention = map(int, bits.split("/"))
    assert with_bits(recipe, bits) == msgspec.structs.replace(
        recipe, weight_bits=weight, activation_bits=activation, attention_bits=attention
    )


def test_with_methods_adds_the_methods_of_the_low_bit_recipes() -> None:
    def chosen(name: str, bits: str) -> Recipe:
        return msgspec.structs.replace(with_methods(with_bits(RECIPES[name], bits)), name="")

    def named(name: str) -> Recipe:
        return msgspec.structs.replace(RECIPES[name], name="")

    assert chosen("fqvit", "6/6/4") == chosen("w4a4", "6/6/4") == named("w6a6")
    assert chosen("fqvit", "4/4/4") == chosen("w6a6", "4/4/4") == named("w4a4")
    assert chosen("w4", "4/4/4") == msgspec.structs.replace(named("w4a4"), values="widened")
    assert chosen("fqvit", "4/8/4") == named("w4")
    assert chosen("fqvit", "8/6/4").rounding == "reconstructed" and chosen("fqvit", "6/8/4").rounding == "reconstructed"
    assert chosen("embedding", "6/6/4").values == "widened" and chosen("embedding", "6/6/4").ranges == "least-error"
    assert chosen("fqvit", "8/8/8").rounding == "weighted" and chosen("embedding", "4/8/4").rounding == "weighted"
    for name in ("fq-vit", "minmax", "npu", "ptq-vit", "auto"):
        assert with_methods(with_bits(RECIPES[name], "4/4/4")) == with_bits(RECIPES[name], "4/4/4")


@pytest.mark.parametrize(
    "text",
    ['ranges = "least-error"', 'rounding = "reconstructed"', 'gelu = "spaced"', 'gelu = "spaced"\nrounding = "compensated"'],
)
def test_methods_for_few_bits_need_each_other(text: str, tmp_path: Path) -> None:
    with pytest.raises(FqvitError, match="requires"):
        load_recipe(written(tmp_path, text))


def test_a_file_merges_its_site_rules_into_those_of_its_base(tmp_path: Path) -> None:
    recipe = load_recipe(written(tmp_path, 'base = "fqvit"\nk = 2'))
    assert recipe == msgspec.structs.replace(RECIPES["fqvit"], name="mine", k=2)
    recipe = load_recipe(written(tmp_path, 'base = "fqvit"\n[sites.scores]\nbits = 10'))
    assert recipe.sites == {**RECIPES["fqvit"].sites, "scores": SiteRule(bits=10)}
    recipe = load_recipe(written(tmp_path, 'base = "fqvit"\n[sites.residual]\nobserver = "omse"'))
    assert recipe.sites["residual"] == SiteRule(bits=16, observer="omse")


def test_the_recipe_of_a_detector_rounds_weights_to_nearest_instead_of_weighting_tokens() -> None:
    for name in ("fqvit", "fast", "npu", "embedding"):
        assert detector_recipe(RECIPES[name]) == msgspec.structs.replace(RECIPES[name], rounding="nearest")
    for name in ("fq-vit", "fq-vit-original", "minmax", "auto", "w4", "w6a6", "w4a4"):
        assert detector_recipe(RECIPES[name]) is RECIPES[name]


def test_recipes_without_integer_programs_are_rejected_for_detectors() -> None:
    with pytest.raises(FqvitError, match="^recipe partial: .*no integer program"):
        detector_recipe(RECIPES["partial"])
    searched = Recipe(name="searched", nonlinear="float", intervals="similarity", symmetric=True, attention="uniform")
    with pytest.raises(FqvitError, match="^recipe searched: LayerNorm and Softmax stay float"):
        detector_recipe(searched)
    with pytest.raises(FqvitError, match="^recipe wide: its attention codes are only simulated"):
        detector_recipe(Recipe(name="wide", attention="log2-wide"))
