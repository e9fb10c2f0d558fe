"""Build the torch module of a config, with random or zero weights."""

from __future__ import annotations

import torch
from torch import nn

from fqvit.models.config import BeitConfig, DinoV3Config, SwinV2Config, VisionConfig
from fqvit.models.families.beit import Beit
from fqvit.models.families.dinov3 import DinoV3
from fqvit.models.families.swinv2 import SwinV2
from fqvit.models.families.vision_transformer import VisionTransformer

FamilyConfig = VisionConfig | DinoV3Config | BeitConfig | SwinV2Config


def build_family(config: FamilyConfig) -> nn.Module:
    """Build the module without changing torch's random state."""
    with torch.random.fork_rng(devices=[]):
        if isinstance(config, VisionConfig):
            return VisionTransformer(config)
        if isinstance(config, DinoV3Config):
            return DinoV3(config)
        return Beit(config) if isinstance(config, BeitConfig) else SwinV2(config)
