"""Tests of peers (other runtimes): which are available, how missing ones are reported, and how their models are prepared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fqvit.bench import peers
from fqvit.errors import FqvitError


def test_repeated_libraries_are_parsed_once_and_order_is_kept() -> None:
    assert peers.parse("openvino, torch,openvino") == ("openvino", "torch")
    assert peers.parse("none") == ()


@pytest.mark.parametrize("words", ["tensorrt", "torch,", "", "torch,none"])
def test_unknown_peers_are_rejected(words: str) -> None:
    with pytest.raises(FqvitError, match=r"expected some of torch,onnxruntime,openvino, or none"):
        peers.parse(words)


def test_missing_peers_are_skipped_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "installed", lambda module: module in ("torch", "onnx", "openvino"))
    chosen, skipped = peers.choose(("onnxruntime", "openvino", "torch"))
    assert [peer.name for peer in chosen] == ["torch fp32", "openvino fp32"]
    reasons = {each.peer: each.reason for each in skipped}
    assert reasons["openvino int8"] == "nncf not installed: pip install nncf"
    assert reasons["onnxruntime int8"] == "onnxruntime not installed: pip install onnxruntime"
    monkeypatch.setattr(peers, "installed", lambda module: False)
    reasons = {each.peer: each.reason for each in peers.choose(("openvino",))[1]}
    assert reasons["openvino fp32"] == "torch and onnx and openvino not installed: pip install torch onnx openvino"


@pytest.mark.parametrize("kind", ["vit", "distilled", "mean", "swin", "padded swin"])
def test_float_models_with_faster_attention_and_gathers_give_the_same_values(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from fqvit.bench.eager import quicken, read
    from fqvit.bench.measure import normalised
    from fqvit.bench.prepare import save_torch
    from fqvit.models.pixels import normalise
    from tests.factories import float_model, images_for

    model = float_model(kind)
    pixels = images_for(model.preprocess, 3)
    x = normalise(pixels, model.preprocess)
    np.testing.assert_allclose(normalised(pixels, model.preprocess), x.numpy(), rtol=1e-5, atol=1e-6)
    with torch.inference_mode():
        expected = model.module(x).clone()
        assert torch.equal(read(str(save_torch(model, tmp_path)))(x), expected)
        for _ in range(2):
            torch.testing.assert_close(quicken(model.module)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weights", ["s8", "u8"])
def test_saturation_is_detected_by_running_a_probe(weights: str) -> None:
    pytest.importorskip("onnx")
    from fqvit.bench.prepare import EXPECTED_PRODUCT, exactness

    def gives(value: int) -> tuple[bool, str]:
        return exactness(lambda model, x: np.full((64, 64), value, np.float32), weights)

    assert gives(EXPECTED_PRODUCT[weights])[0] is True
    exact, said = gives(7)
    assert exact is False and "saturates" in said and said.startswith("inexact on this CPU")
