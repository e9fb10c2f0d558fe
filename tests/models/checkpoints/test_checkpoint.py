"""Checkpoints of ViT, DeiT and Swin: every container and layout, and the errors for checkpoints that do not match.

The inverse key maps are written here independently of keymaps.py. See also: ../families/ (other families and their layouts).
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fqvit.data.preprocess import Preprocess
from fqvit.errors import FqvitError
from fqvit.models import zoo
from fqvit.models.config import SwinConfig, ViTConfig
from fqvit.models.load import build, load_model

State = dict[str, Tensor]
VIT = ViTConfig(image=(16, 16), patch=4, channels=3, classes=5, width=12, depth=2, heads=3, hidden=48)
SWIN = SwinConfig(image=(28, 28), patch=2, channels=3, classes=5, width=8, depths=(2, 2), heads=(2, 4), window=7)
GELU: dict[str, Any] = {"activation": "gelu"}  # state dicts in Hugging Face's layout do not show the activation
OTHERS = [
    ("vit_two", ViTConfig(**{**vars(VIT), "width": 18})),
    ("vit_one_distilled", ViTConfig(**{**vars(VIT), "prefix": 2})),
]


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for name, config in [("vit_one", VIT), ("swin_one", SWIN), *OTHERS]:
        side = config.image[0]
        rows.append(zoo.Row(name, config, Preprocess(side, side, 3, side + 2, "bicubic", (0.1, 0.2, 0.3), (0.5,) * 3)))
        monkeypatch.setitem(zoo.BY_NAME, name, rows[-1])
    monkeypatch.setattr(zoo, "ROWS", (*rows, *zoo.ROWS))


def random_state(config: ViTConfig | SwinConfig) -> State:
    generator = torch.Generator().manual_seed(0)
    return {k: 0.3 * torch.randn(v.shape, generator=generator) for k, v in build(config).state_dict().items()}


def logits(name: str, weights: Any, **settings: Any) -> Tensor:
    model = load_model(name, weights, **settings)
    images = torch.randn(2, 3, model.preprocess.height, model.preprocess.width, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out: Tensor = model.module(images)
    return out


def to_google(state: State) -> dict[str, np.ndarray]:
    """Convert timm's ViT names to those of Google's augreg files; the input axis of a kernel comes first."""
    width, heads, out = VIT.width, VIT.heads, {}
    flat = {k: v.numpy() for k, v in state.items()}
    out["cls"], out["Transformer/posembed_input/pos_embedding"] = flat["cls_token"], flat["pos_embed"]
    out["embedding/kernel"] = flat["patch_embed.proj.weight"].transpose(2, 3, 1, 0)
    out["embedding/bias"] = flat["patch_embed.proj.bias"]
    out["Transformer/encoder_norm/scale"], out["Transformer/encoder_norm/bias"] = flat["norm.weight"], flat["norm.bias"]
    out["head/kernel"], out["head/bias"] = flat["head.weight"].T, flat["head.bias"]
    for i in range(VIT.depth):
        block, there = f"blocks.{i}.", f"Transformer/encoderblock_{i}/"
        for n, number in (("norm1", 0), ("norm2", 2)):
            out[f"{there}LayerNorm_{number}/scale"] = flat[f"{block}{n}.weight"]
            out[f"{there}LayerNorm_{number}/bias"] = flat[f"{block}{n}.bias"]
        attention = f"{there}MultiHeadDotProductAttention_1/"
        for j, part in enumerate(("query", "key", "value")):
            rows = slice(j * width, (j + 1) * width)
            out[f"{attention}{part}/kernel"] = flat[f"{block}attn.qkv.weight"][rows].T.reshape(width, heads, -1)
            out[f"{attention}{part}/bias"] = flat[f"{block}attn.qkv.bias"][rows].reshape(heads, -1)
        out[f"{attention}out/kernel"] = flat[f"{block}attn.proj.weight"].T.reshape(heads, -1, width)
        out[f"{attention}out/bias"] = flat[f"{block}attn.proj.bias"]
        for j in (0, 1):
            out[f"{there}MlpBlock_3/Dense_{j}/kernel"] = flat[f"{block}mlp.fc{j + 1}.weight"].T
            out[f"{there}MlpBlock_3/Dense_{j}/bias"] = flat[f"{block}mlp.fc{j + 1}.bias"]
    return out


def to_hugging_face(state: State, kind: str) -> State:
    """Convert timm's names to those of files written by transformers."""
    inner = "self" if kind == "swin" else "attention"
    renames = [
        (r"^patch_embed\.proj", f"{kind}.embeddings.patch_embeddings.projection"),
        (r"^patch_embed\.norm", f"{kind}.embeddings.norm"),
        (r"^cls_token", f"{kind}.embeddings.cls_token"),
        (r"^dist_token", f"{kind}.embeddings.distillation_token"),
        (r"^pos_embed", f"{kind}.embeddings.position_embeddings"),
        (r"^norm\.", f"{kind}.layernorm."),
        (r"^head_dist", "distillation_classifier"),
        (r"^head\.fc|^head", "cls_classifier" if "head_dist.weight" in state else "classifier"),
        (r"^blocks", f"{kind}.encoder.layer"),
        (r"^layers\.(\d+)\.blocks", rf"{kind}.encoder.layers.\1.blocks"),
        (r"^layers\.1\.downsample", f"{kind}.encoder.layers.0.downsample"),
        (r"\.norm1\.", ".layernorm_before."),
        (r"\.norm2\.", ".layernorm_after."),
        (r"\.mlp\.fc1", ".intermediate.dense"),
        (r"\.mlp\.fc2", ".output.dense"),
        (r"\.attn\.proj", ".attention.output.dense"),
        (r"\.attn\.(qkv|relative)", rf".attention.{inner}.\1"),
    ]
    out: State = {}
    for key, value in state.items():
        for pattern, new in renames:
            key = re.sub(pattern, new, key)
        if ".qkv." in key:
            for part, third in zip(("query", "key", "value"), value.chunk(3)):
                out[key.replace("qkv", part)] = third.clone()
        else:
            out[key] = value
    return out


def to_original_swin(state: State) -> State:
    """Convert to the layout of Microsoft's release: patch merging at the end of a stage, head without .fc, with buffers."""
    out = {k.replace("layers.1.downsample", "layers.0.downsample").replace("head.fc.", "head."): v for k, v in state.items()}
    out["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.long)
    out["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 49, 49)
    return out


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin"])
def test_every_container_gives_the_same_model_and_names_its_file(tmp_path: Path, suffix: str) -> None:
    state, path = random_state(VIT), tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    model = load_model("vit_one", path)
    assert re.fullmatch(rf"w\{suffix} sha256:[0-9a-f]{{64}}", model.source)
    assert torch.equal(logits("vit_one", path), logits("vit_one", state))


@pytest.mark.parametrize("nest", ["model", "state_dict", "model_ema"])
def test_nesting_and_prefixes_of_training_scripts_are_removed(tmp_path: Path, nest: str) -> None:
    state = random_state(VIT)
    torch.save({nest: {f"module.{k}": v for k, v in state.items()}, "epoch": 3, "optimizer": {}}, tmp_path / "w.pth")
    assert torch.equal(logits("vit_one", tmp_path / "w.pth"), logits("vit_one", state))


def test_google_npz_files_load(tmp_path: Path) -> None:
    state = random_state(VIT)
    np.savez(tmp_path / "w.npz", **to_google(state))  # type: ignore[arg-type]
    assert torch.equal(logits("vit_one", tmp_path / "w.npz"), logits("vit_one", state))


def test_an_npz_with_another_number_of_heads_is_rejected(tmp_path: Path) -> None:
    arrays = to_google(random_state(VIT))
    arrays = {k: v.reshape(12, 2, 6) if k.endswith(("query/kernel",)) else v for k, v in arrays.items()}
    np.savez(tmp_path / "w.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(FqvitError, match="2 heads.*expected 3"):
        load_model("vit_one", tmp_path / "w.npz")


@pytest.mark.parametrize(
    ("name", "config", "kind"),
    [("vit_one", VIT, "vit"), ("vit_one", VIT, "deit"), ("swin_one", SWIN, "swin")],
)
def test_hugging_face_layouts_load(name: str, config: ViTConfig | SwinConfig, kind: str) -> None:
    state = random_state(config)
    # Close but not equal: transformers and timm have different epsilons.
    torch.testing.assert_close(logits(name, to_hugging_face(state, kind), **GELU), logits(name, state), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "config", "kind", "eps"), [("vit_one", VIT, "vit", 1e-12), ("swin_one", SWIN, "swin", 1e-5)])
def test_hugging_face_layouts_get_the_epsilon_of_transformers(name: str, config: Any, kind: str, eps: float) -> None:
    assert load_model(name, to_hugging_face(random_state(config), kind), **GELU).module.config.eps == eps


def test_the_original_swin_layout_loads() -> None:
    state = random_state(SWIN)
    assert torch.equal(logits("swin_one", to_original_swin(state)), logits("swin_one", state))


def distilled_state() -> State:
    state = random_state(VIT)
    state["dist_token"], state["pos_embed"] = torch.randn(1, 1, 12), torch.randn(1, 18, 12)
    state["head_dist.weight"], state["head_dist.bias"] = torch.randn(5, 12), torch.randn(5)
    return state


def test_both_layouts_of_the_distilled_model_give_the_same_logits() -> None:
    state = distilled_state()
    theirs = logits("vit_one_distilled", to_hugging_face(state, "deit"), **GELU)
    torch.testing.assert_close(theirs, logits("vit_one_distilled", state), rtol=1e-4, atol=1e-4)


def test_load_model_neither_modifies_nor_shares_the_given_tensors() -> None:
    state = random_state(VIT)
    state["blocks.0.ls1.gamma"] = torch.full((12,), 0.5)
    before = {k: v.clone() for k, v in state.items()}
    model = load_model("vit_one", state, heads=3, pool="token", activation="gelu")
    with torch.no_grad():
        for p in model.module.parameters():
            p.zero_()
    assert all(torch.equal(state[k], before[k]) for k in before)
    assert not model.module.training


def test_the_source_identifies_the_tensors() -> None:
    state = random_state(VIT)
    source = load_model("vit_one", state).source
    assert load_model("vit_one", dict(reversed(state.items()))).source == source
    state["head.bias"] = state["head.bias"] + 1
    assert load_model("vit_one", state).source != source


def test_sizes_in_the_checkpoint_override_those_of_the_named_model() -> None:
    config = ViTConfig(**{**vars(VIT), "image": (24, 24), "patch": 8, "channels": 1, "classes": 3})
    model = load_model("vit_one", random_state(config), classes=["a", "b", "c"])
    assert model.module.config == config
    p = model.preprocess
    assert (p.height, p.width, p.channels, p.resize, p.mean) == (24, 24, 1, 27, (pytest.approx(0.2),))
    assert model.classes == ("a", "b", "c")


def test_load_model_does_not_change_the_random_state() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    load_model("vit_one", random_state(VIT))
    assert torch.equal(torch.rand(1), expected)


def test_a_wrong_number_of_class_names_is_rejected() -> None:
    with pytest.raises(FqvitError, match="2 class names for 5 logits"):
        load_model("vit_one", random_state(VIT), classes=["a", "b"])


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("blocks.0.attn.q_norm.weight", "norms of q and k"),
        ("rope.freqs", "learned rotary positions"),
        ("pre_logits.fc.weight", "pre-logits"),
        ("blocks_token_only.0.norm1.weight", "CaiT"),
        ("patch_embed.norm.weight", "a norm after the patch embedding"),
        ("blocks.0.attn.gate.weight", "gated attention"),
    ],
)
def test_errors_for_unsupported_vit_variants_name_the_feature(key: str, word: str) -> None:
    with pytest.raises(FqvitError, match=f"'{re.escape(key)}' means .*{word}.*pass the module"):
        load_model("vit_one", {**random_state(VIT), key: torch.zeros(3)})


def test_swins_with_absolute_position_embeddings_or_of_version_2_are_rejected() -> None:
    with pytest.raises(FqvitError, match="absolute positions"):
        load_model("swin_one", {**random_state(SWIN), "absolute_pos_embed": torch.zeros(3)})
    with pytest.raises(FqvitError, match="has the tensors of family 'swinv2', expected 'swin'"):
        load_model("swin_one", {**random_state(SWIN), "layers.0.blocks.0.attn.logit_scale": torch.zeros(2, 1, 1)})


def changed(state: State, *gone: str, **new: Tensor) -> State:
    return {k: v for k, v in {**state, **new}.items() if k not in gone}


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        (
            "vit_one",
            lambda: random_state(OTHERS[0][1]),
            "width 18 and depth 2.*looks like vit_two or another model of width 18",
        ),
        ("vit_one", distilled_state, "unexpected key 'dist_token'.*looks like vit_one_distilled"),
        ("vit_one_distilled", lambda: random_state(VIT), "missing key 'head_dist.weight'.*looks like vit_one"),
        ("vit_one", lambda: random_state(SWIN), "is a Swin. This looks like swin_one"),
        ("swin_one", lambda: random_state(VIT), "is a ViT. This looks like vit_one"),
        ("vit_one", lambda: changed(random_state(VIT), "norm.bias", "blocks.0.norm1.weight"), "lacks 2 keys: .*'norm.bias'"),
        ("vit_one", lambda: changed(random_state(VIT), "pos_embed"), "missing key 'pos_embed'"),
        ("vit_one", lambda: changed(random_state(VIT), surprise=torch.zeros(1)), "1 unexpected key: 'surprise'"),
        ("vit_one", lambda: {**random_state(VIT), "norm.bias": torch.zeros(7)}, r"'norm.bias' is \[7\], expected \[12\]"),
        ("vit_one", lambda: {**random_state(VIT), "norm.bias": torch.full((12,), torch.nan)}, "'norm.bias' contains NaN"),
        ("vit_one", lambda: {**random_state(VIT), "pos_embed": torch.zeros(1, 8, 12)}, "8 positions.*square grid"),
        ("vit_one", lambda: {"conv1.weight": torch.zeros(3)}, "not a known layout of a vision transformer"),
        ("vit_one", dict, "contains no weights"),
        ("vit_one", lambda: changed(distilled_state(), "head_dist.bias"), "unexpected key 'dist_token'"),
        ("vit_one_distilled", lambda: changed(distilled_state(), "head_dist.bias"), "lacks 1 key: 'head_dist.bias'"),
    ],
)
def test_checkpoint_errors_name_the_key_and_the_likely_model(name: str, state: Any, message: str) -> None:
    with pytest.raises(FqvitError, match=message) as caught:
        load_model(name, state())
    assert "\n" not in str(caught.value)


def test_missing_blocks_are_reported_by_their_keys() -> None:
    state = {k: v for k, v in random_state(VIT).items() if not k.startswith("blocks.1.")}
    with pytest.raises(FqvitError, match=r"lacks 12 keys: 'blocks\.1\.norm1\.weight', .*\.\.\.\. The checkpoint is incomplete"):
        load_model("vit_one", state)


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("run-by-the-checkpoint",)


def test_a_pickle_with_code_is_rejected_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Attack()}, "new.pth")
    Path("old.pth").write_bytes(pickle.dumps({"model": Attack()}, protocol=2))
    np.savez("w.npz", cls=np.array([Attack()], dtype=object))
    for name in ("new.pth", "old.pth", "w.npz"):
        with pytest.raises(FqvitError) as caught:
            load_model("vit_one", name)
        assert "\n" not in str(caught.value)
    assert not Path("run-by-the-checkpoint").exists()


def written(folder: Path) -> list[Path]:
    state = random_state(VIT)
    save_file(state, folder / "w.safetensors")
    torch.save(state, folder / "w.pth")
    np.savez(folder / "w.npz", **to_google(state))  # type: ignore[arg-type]
    return [folder / "w.safetensors", folder / "w.pth", folder / "w.npz"]


def test_truncated_and_random_files_give_a_one_line_error(tmp_path: Path) -> None:
    for path in written(tmp_path):
        whole = path.read_bytes()
        for damaged in (b"", whole[:5], whole[:100], whole[: len(whole) // 2], whole[:-1], b"garbage" * 100):
            path.write_bytes(damaged)
            with pytest.raises(FqvitError, match="Download it again") as caught:
                load_model("vit_one", path)
            assert "\n" not in str(caught.value)


def test_the_error_for_a_wrong_extension_names_the_right_one(tmp_path: Path) -> None:
    for path in written(tmp_path):
        wrong = tmp_path / ("wrong.pth" if path.suffix != ".pth" else "wrong.npz")
        wrong.write_bytes(path.read_bytes())
        with pytest.raises(FqvitError, match=rf"Rename it to wrong\{path.suffix}"):
            load_model("vit_one", wrong)
    (tmp_path / "w.onnx").write_bytes(b"x")
    with pytest.raises(FqvitError, match="unknown checkpoint type '.onnx'"):
        load_model("vit_one", tmp_path / "w.onnx")


def test_missing_files_and_missing_weights_are_reported() -> None:
    with pytest.raises(FqvitError, match="no such file"):
        load_model("vit_one", "nowhere.pth")
    with pytest.raises(FqvitError, match="no weights given"):
        load_model("vit_tiny")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_tensor_of_any_shape_raises_no_exception_except_fqvit_error(data: st.DataObject) -> None:
    name, config = data.draw(st.sampled_from([("vit_one", VIT), ("swin_one", SWIN)]))
    rows = {name: zoo.Row(name, config, Preprocess(*config.image, 3, 28, "bicubic", (0.5,) * 3, (0.5,) * 3))}
    state = random_state(config)
    layout = data.draw(st.sampled_from(["timm", "hf", "google"] if name == "vit_one" else ["timm", "hf", "original"]))
    if layout == "google":
        state = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in to_google(state).items()}
    elif layout != "timm":
        state = to_hugging_face(state, name[:-4]) if layout == "hf" else to_original_swin(state)
    key = data.draw(st.sampled_from(sorted(state)))
    state[key] = torch.zeros(data.draw(st.lists(st.integers(0, 5), max_size=5)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.BY_NAME, name, rows[name])
        try:
            load_model(name, state)
        except FqvitError as error:
            assert "\n" not in str(error)


def test_real_weights_load_strictly(shared_data: Path) -> None:
    for name in ("deit_tiny", "vit_tiny"):
        model = load_model(name, shared_data / "weights" / f"{name}_patch16_224.safetensors")
        assert sum(p.numel() for p in model.module.parameters()) == 5_717_416
