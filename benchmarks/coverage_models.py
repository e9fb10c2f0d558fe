"""Build the models of coverage.py with random weights: timm models by name, transformers classes with small configs.

Images are as small as the architecture allows, so that all models together take hours, not days.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DECLARED: list[torch.library.Library] = []  # a garbage-collected Library unregisters its operators
MANY = 100  # millions of parameters; a larger model is built with two blocks, or with one or two per stage
FAILURES = (TypeError, ValueError, RuntimeError, NotImplementedError, AssertionError, IndexError, AttributeError, KeyError)

# Modules of timm. At least 90 % (TIMM_90) or 60 % (TIMM_60) of the models that they define must quantize and run.
TIMM_90 = [
    "vision_transformer",
    "deit",
    "beit",
    "eva",
    "swin_transformer",
    "swin_transformer_v2",
    "vision_transformer_relpos",
    "cait",
]
TIMM_60 = [
    "vision_transformer_hybrid",
    "levit",
    "maxxvit",
    "mobilevit",
    "tiny_vit",
    "fastvit",
    "pit",
    "pvt_v2",
    "xcit",
    "twins",
    "nest",
]
TIMM_60 += ["efficientformer"]


@dataclass(frozen=True)
class Built:
    """A module, its image size, the parameters of the whole model in millions, and whether it was built with fewer blocks."""

    module: nn.Module
    size: tuple[int, int, int]
    millions: float
    shallow: bool = False


@dataclass(frozen=True)
class Plan:
    """How to build a model of timm: options of its constructor, and the size of the images.

    configuration: equal for two names that build the same module, so that one run answers for both
    """

    name: str
    options: dict[str, Any]
    size: tuple[int, int, int]
    millions: float
    shallow: bool
    configuration: str


def library(name: str) -> ModuleType:
    """Import timm or transformers, even if torchvision was built for another torch.

    In that case, declare the operators of torchvision, so that the import succeeds. They are never called.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError):  # RuntimeError: its operators are missing
            _declare_operators()
        return importlib.import_module(name)


def _declare_operators() -> None:
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            own = torch.library.Library("torchvision", "FRAGMENT")
            own.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            DECLARED.append(own)


def randomised(module: nn.Module) -> nn.Module:
    """Add noise to tensors that are constant or nearly so after construction, so that no term vanishes.

    timm initialises class tokens with a standard deviation of 1e-6; a norm would magnify the rounding errors of such values.
    """
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_floating_point() and tensor.numel() and bool((tensor - tensor.flatten()[0]).abs().max() < 1e-3):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data = tensor.data * (1 + 0.1 * noise.abs()) if name.endswith("var") else tensor.data + 0.1 * noise
    return module.eval()


# timm


def plan(name: str, shallow: bool = False, whole: bool = False) -> Plan:
    """Find options that build a model of timm.

    shallow: use only two blocks, or one or two per stage   whole: keep the model's default image size
    """
    timm = library("timm")
    default = timm.models.get_pretrained_cfg(name).input_size
    full = _skeleton(timm, name, None, {})
    millions = sum(p.numel() for p in full.parameters()) / 1e6
    shorter: list[dict[str, Any]] = [{}]
    if millions > MANY or shallow:
        shorter = [{"depth": 2}, {"depths": (1, 1, 2, 1)}, {"depths": (1, 1, 2)}, {"layers": (1, 1, 1, 1), "depth": 2}, {}]
        shorter = _grouped_queries(full) + shorter
    problem: Exception | None = None
    for extra in shorter:
        for options, size in [({}, default)] if whole else _sizes(timm, name, default):
            try:
                module = _skeleton(timm, name, size, {**options, **extra})
                return Plan(name, {**options, **extra}, size, millions, bool(extra), configuration(module, size))
            except FAILURES as error:
                problem = error
    raise ValueError(f"cannot be built: {problem}")


def _grouped_queries(full: nn.Module) -> list[dict[str, Any]]:
    """Return options for two blocks of a model whose middle blocks have fewer key/value heads, such as Sapiens2."""
    blocks = list(getattr(full, "blocks", ()))
    heads = [getattr(getattr(block, "attn", None), "num_kv_heads", None) for block in blocks]
    if len(set(heads)) < 2:
        return []
    return [{"depth": 2, "num_kv_heads": (heads[0], heads[len(heads) // 2])}]


def build(plan: Plan) -> Built:
    """Build a model of timm with random weights."""
    module = randomised(library("timm").create_model(plan.name, **plan.options))
    return Built(module, plan.size, plan.millions, plan.shallow)


def _skeleton(timm: ModuleType, name: str, size: tuple[int, int, int] | None, options: dict[str, Any]) -> nn.Module:
    """Build a model and, if a size is given, run it on zeros. If possible, use the meta device, which needs no memory."""
    for device in ("meta", "cpu"):
        try:
            with torch.device(device), torch.no_grad():
                module: nn.Module = timm.create_model(name, **options).eval()
                if size is not None:
                    module(torch.zeros(1, *size))
                return module
        except TypeError:  # no such option
            raise
        except FAILURES:
            if device == "cpu":
                raise
    raise AssertionError


def configuration(module: nn.Module, size: tuple[int, int, int]) -> str:
    """Return a hash of everything that determines what a module computes, except the values of its weights.

    That is the image size and, for every submodule, its class, its attributes and the shapes of its tensors. Two model
    names of timm with equal hashes differ only in their published weights and their default image size, which `size` replaces.
    """
    lines = [repr(size)]
    for path, part in module.named_modules():
        own = {k: v for k, v in vars(part).items() if not k.startswith("_") and k not in ("pretrained_cfg", "default_cfg")}
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors]
        lines.append(f"{path} {_describe(type(part))} {_describe(own)} {shapes}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"tensor {tuple(value.shape)}"
    if isinstance(value, functools.partial):
        return f"partial {_describe(value.func)} {_describe(value.args)} {_describe(value.keywords)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in sorted(value.items(), key=lambda item: str(item[0]))) + "}"
    if isinstance(value, list | tuple | set):
        return "[" + ", ".join(map(_describe, value)) + "]"
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, str | int | float | complex | None | torch.dtype | torch.device | enum.Enum):
        return repr(value)
    return f"{type(value).__qualname__} {_describe(vars(value)) if hasattr(value, '__dict__') else repr(value)}"


def _sizes(timm: ModuleType, name: str, default: tuple[int, int, int]) -> Iterator[tuple[dict[str, Any], tuple[int, int, int]]]:
    """Yield options and image sizes to try, small ones first."""
    channels = default[0]
    module = timm.models.model_entrypoint(name).__module__.rsplit(".", 1)[-1]
    for side in _sides(module, name):
        if side < default[1]:
            yield {"img_size": side}, (channels, side, side)
            yield {}, (channels, side, side)
    yield {}, default


def _sides(module: str, name: str) -> list[int]:
    patch = next((int(p) for p in ("14", "16", "32", "8", "12") if f"patch{p}" in name or f"_p{p}" in name), 16)
    if module in ("vision_transformer", "deit", "beit", "eva", "vision_transformer_relpos", "cait"):
        return [patch * 5, patch * 6]
    if module in ("swin_transformer", "swin_transformer_v2"):
        window = next((w for w in (12, 16, 24, 8, 7) if f"window{w}" in name or f"w{w}_" in name), 7)
        return [8 * window]
    if module == "xcit":
        return [patch * 5]
    if module in ("maxxvit", "vision_transformer_hybrid", "levit", "tiny_vit", "efficientformer", "efficientformer_v2", "nest"):
        return [128, 160]
    return [96, 128]


# transformers


class _Patches(nn.Module):
    """Feed images to Siglip2, which reads patches, a mask and the grid. All images have the same size here."""

    def __init__(self, model: nn.Module, patch: int, side: int) -> None:
        super().__init__()
        self.model, self.patch, self.grid = model, patch, side // patch

    def forward(self, images: Tensor) -> Any:
        n, channels = images.shape[:2]
        x = images.reshape(n, channels, self.grid, self.patch, self.grid, self.patch).permute(0, 2, 4, 3, 5, 1)
        mask = torch.ones(n, self.grid**2, dtype=torch.int64)
        shapes = torch.full((n, 2), self.grid)
        return self.model(x.reshape(n, self.grid**2, -1), mask, shapes)


class _InOrder(nn.Module):
    """ViTMAE's encoder without masking: fixed noise keeps the patches in their order."""

    def __init__(self, model: nn.Module, patches: int) -> None:
        super().__init__()
        self.model, self.patches = model, patches

    def forward(self, images: Tensor) -> Any:
        noise = torch.arange(self.patches, dtype=torch.float32).expand(images.shape[0], -1)
        return self.model(images, noise=noise).last_hidden_state


SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
WINDOWS = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "image_size": 64, "patch_size": 4}


def _simple(model: str, config: str, side: int = 64, **options: Any) -> Callable[[ModuleType], tuple[nn.Module, int]]:
    def build(transformers: ModuleType) -> tuple[nn.Module, int]:
        return getattr(transformers, model)(getattr(transformers, config)(**options)), side

    return build


def _mae(transformers: ModuleType) -> tuple[nn.Module, int]:
    config = transformers.ViTMAEConfig(**SMALL, image_size=64, patch_size=16, mask_ratio=0.0)
    return _InOrder(transformers.ViTMAEModel(config), 16), 64


def _siglip2(transformers: ModuleType) -> tuple[nn.Module, int]:
    config = transformers.Siglip2VisionConfig(**SMALL, patch_size=16, num_patches=16)
    return _Patches(transformers.Siglip2VisionModel(config), 16, 64), 64


def _siglip_classifier(transformers: ModuleType) -> tuple[nn.Module, int]:
    config = transformers.SiglipConfig(
        vision_config={**SMALL, "image_size": 64, "patch_size": 16}, text_config=SMALL, num_labels=10
    )
    return transformers.SiglipForImageClassification(config), 64


def _depth_anything(transformers: ModuleType) -> tuple[nn.Module, int]:
    backbone = transformers.Dinov2Config(
        **{k: v for k, v in SMALL.items() if k != "num_hidden_layers"}, num_hidden_layers=4, image_size=70, patch_size=14,
        out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
    )  # fmt: skip
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone,
        patch_size=14,
        reassemble_hidden_size=48,
        neck_hidden_sizes=[8, 16, 24, 32],
        fusion_hidden_size=16,
    )
    return transformers.DepthAnythingForDepthEstimation(config), 70


SQUARE = {**SMALL, "image_size": 64, "patch_size": 16}
TRANSFORMERS: dict[str, Callable[[ModuleType], tuple[nn.Module, int]]] = {
    "ViTForImageClassification": _simple("ViTForImageClassification", "ViTConfig", **SQUARE),
    "DeiTForImageClassification": _simple("DeiTForImageClassification", "DeiTConfig", **SQUARE),
    "DeiTForImageClassificationWithTeacher": _simple("DeiTForImageClassificationWithTeacher", "DeiTConfig", **SQUARE),
    "SwinForImageClassification": _simple("SwinForImageClassification", "SwinConfig", **WINDOWS, window_size=4),
    "Swinv2ForImageClassification": _simple("Swinv2ForImageClassification", "Swinv2Config", **WINDOWS, window_size=4),
    "BeitForImageClassification": _simple(
        "BeitForImageClassification", "BeitConfig", **SQUARE, use_relative_position_bias=True
    ),
    "Data2VecVisionForImageClassification": _simple(
        "Data2VecVisionForImageClassification", "Data2VecVisionConfig", **SQUARE, use_shared_relative_position_bias=True
    ),
    "Dinov2Model": _simple("Dinov2Model", "Dinov2Config", **SQUARE),
    "Dinov2ForImageClassification": _simple("Dinov2ForImageClassification", "Dinov2Config", **SQUARE, use_swiglu_ffn=True),
    "Dinov2WithRegistersModel": _simple("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", **SQUARE),
    "Dinov2WithRegistersForImageClassification": _simple(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", **SQUARE
    ),
    "DINOv3ViTModel": _simple(
        "DINOv3ViTModel", "DINOv3ViTConfig", **{**SQUARE, "num_attention_heads": 2, "hidden_size": 64}, num_register_tokens=4
    ),
    "CLIPVisionModel": _simple("CLIPVisionModel", "CLIPVisionConfig", **SQUARE),
    "CLIPVisionModelWithProjection": _simple("CLIPVisionModelWithProjection", "CLIPVisionConfig", **SQUARE, projection_dim=32),
    "SiglipVisionModel": _simple("SiglipVisionModel", "SiglipVisionConfig", **SQUARE),
    "SiglipForImageClassification": _siglip_classifier,
    "Siglip2VisionModel": _siglip2,
    "ViTMAEModel": _mae,
    "ViTMSNModel": _simple("ViTMSNModel", "ViTMSNConfig", **SQUARE),
    "IJepaModel": _simple("IJepaModel", "IJepaConfig", **SQUARE),
    "Aimv2VisionModel": _simple("Aimv2VisionModel", "Aimv2VisionConfig", **SQUARE),
    "SegformerForImageClassification": _simple(
        "SegformerForImageClassification", "SegformerConfig", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], num_labels=10
    ),
    "MobileViTForImageClassification": _simple("MobileViTForImageClassification", "MobileViTConfig", 128, num_labels=10),
    "DepthAnythingForDepthEstimation": _depth_anything,
}


def transformers_model(name: str) -> Built:
    """Build a class of transformers with a small config."""
    module, side = TRANSFORMERS[name](library("transformers"))
    return Built(randomised(module), (3, side, side), sum(p.numel() for p in module.parameters()) / 1e6)
