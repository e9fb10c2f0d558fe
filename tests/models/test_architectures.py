"""The tables of timm's architectures and tags agree with timm."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fqvit.models import architectures
from fqvit.models.config import DinoV3Config, SwinV2Config, VisionConfig

ROOT = Path(__file__).resolve().parents[2]


def test_every_row_can_be_read() -> None:
    assert len(architectures.names()) > 190
    for name in architectures.names():
        known = architectures.lookup(name)
        assert known is not None and architectures.transform(name) is not None, name


def test_settings_that_tensors_do_not_show_come_from_the_name() -> None:
    def config(name: str) -> VisionConfig:
        known = architectures.lookup(name)
        assert known is not None and isinstance(known.config, VisionConfig)
        return known.config

    assert config("vit_base_patch16_gap_224").heads == 16
    assert config("vit_base_patch32_clip_quickgelu_224.openai").activation == "quick_gelu"
    assert config("vit_so400m_patch14_siglip_224").pool == "map"
    assert config("dinov2_vits14_reg").registers == 4
    assert config("dinov2_vits14").image == (518, 518)
    dinov3, swin = architectures.lookup("dinov3_vits16"), architectures.lookup("swinv2_base_window12to16_192to256")
    assert dinov3 is not None and isinstance(dinov3.config, DinoV3Config) and dinov3.config.qv_bias
    assert swin is not None and isinstance(swin.config, SwinV2Config) and swin.config.pretrained_windows == (12, 12, 12, 6)


def test_tags_decide_the_preprocessing() -> None:
    dino, squashed = (
        architectures.transform("vit_small_patch8_224.dino"),
        architectures.transform("vit_base_patch16_siglip_224"),
    )
    assert dino is not None and (dino.mean or ())[0] == 0.485
    assert squashed is not None and squashed.crop is not None
    assert architectures.transform("vit_base_patch16_224.no_such_tag") is None
    assert architectures.transform("resnet50") is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_small_patch16_rope_ape_224", "rotary positions"),
        ("vit_base_patch16_rpn_224", "blocks with another structure"),
        ("eva02_tiny_patch14_224", "rotary positions"),
        ("nest_tiny", "another architecture (nest)"),
    ],
)
def test_unsupported_architectures_of_timm_have_a_reason(name: str, reason: str) -> None:
    assert architectures.lookup(name) is None and reason in (architectures.why_not(name) or "")
    assert architectures.why_not("vit_tiny_patch16_224") is None and architectures.why_not("nothing") is None


def test_the_tables_agree_with_timm(timm: ModuleType) -> None:
    """One or two names per family are compared; scripts/timm_tables.py writes all of them."""
    spec = importlib.util.spec_from_file_location("timm_tables", ROOT / "scripts" / "timm_tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    with (ROOT / "src" / "fqvit" / "assets" / "timm_models.csv").open() as file:
        stored = {row["name"]: row for row in csv.DictReader(file)}
    for name in (
        "vit_tiny_patch16_224",
        "vit_base_patch16_siglip_224",
        "deit_tiny_distilled_patch16_224",
        "vit_small_patch16_dinov3_qkvb",
        "beit_base_patch16_224",
        "swin_tiny_patch4_window7_224",
        "swinv2_tiny_window8_256",
    ):
        found = tables.row(name, timm.create_model(name, device="meta"))
        assert {key: value for key, value in stored[name].items() if value} == {k: v for k, v in found.items() if v}


def test_architectures_do_not_import_torch() -> None:
    code = "import sys; from fqvit.models import architectures as a; assert a.names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
