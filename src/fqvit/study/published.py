"""Published results in percent: ImageNet top-1 (50,000 images), the paper's ablation, and box AP of detectors on COCO.

Sources: FQ-ViT (Lin et al., IJCAI 2022), tables 1 to 3, including the results of other methods that it quotes; PTQ4ViT (Yuan
et al., ECCV 2022) and RepQ-ViT (Li et al., ICCV 2023). The last two use another Swin-B checkpoint, with a float top-1 of 85.27.
"""

from __future__ import annotations

MODELS = (
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "deit_base_patch16_224",
    "vit_base_patch16_224",
    "vit_large_patch16_224",
    "swin_tiny_patch4_window7_224",
    "swin_small_patch4_window7_224",
    "swin_base_patch4_window7_224",
)

# {(recipe, bits): one value per model, in the order of MODELS}
TOP1: dict[tuple[str, str], tuple[float | None, ...]] = {
    ("float", "32/32/32"): (72.21, 79.85, 81.85, 84.53, 85.81, 81.35, 83.20, 83.60),
    ("minmax", "8/8/8"): (70.94, 75.05, 78.02, 23.64, 3.37, 64.38, 74.37, 25.58),
    ("ema", "8/8/8"): (71.17, 75.71, 78.82, 30.30, 3.53, 70.81, 75.05, 28.00),
    ("percentile", "8/8/8"): (71.47, 76.57, 78.37, 46.69, 5.85, 78.78, 78.12, 40.93),
    ("omse", "8/8/8"): (71.30, 75.03, 79.57, 73.39, 11.32, 79.30, 78.96, 48.55),
    ("bit-split", "8/8/8"): (None, 77.06, 79.42, None, None, None, None, None),
    ("ptq-vit", "8/8/8"): (None, 77.47, 80.48, None, None, None, None, None),
    ("ptq4vit", "8/8/8"): (None, 79.47, 81.48, 84.25, None, 81.25, 83.11, 85.15),
    ("ptq4vit", "6/6/6"): (None, 76.28, 80.25, 81.65, None, 80.47, 82.38, 84.01),
    ("repq-vit", "6/6/6"): (70.76, 78.90, 81.27, 83.62, None, 80.69, 82.79, None),
    ("repq-vit", "4/4/4"): (57.43, 69.03, 75.61, 68.48, None, 72.31, 79.45, 78.32),
    ("fq-vit", "8/8/8"): (71.61, 79.17, 81.20, 83.31, 85.03, 80.51, 82.71, 82.97),
    ("fq-vit", "8/8/4"): (71.07, 78.40, 80.85, 82.68, 84.89, 80.04, 82.47, 82.38),
}

# Recipes that share a published row.
SAME = {"fq-vit-8": "fq-vit", "fq-vit-original": "fq-vit"}

# Table 3, ViT-B: {(Power-of-Two Factor, Log-Int-Softmax, bits of attention): top-1}
ABLATION = {(False, False, 8): 23.64, (True, False, 8): 83.31, (True, False, 4): 7.96, (True, True, 4): 82.68}

# Table 2, COCO val2017: {(recipe, bits): one value per detector, in the order of DETECTORS}
DETECTORS = ("mask_rcnn_swin_small", "cascade_mask_rcnn_swin_small")
BOX_AP = {
    ("float", "32/32/32"): (48.5, 52.0),
    ("minmax", "8/8/8"): (32.8, 35.2),
    ("ema", "8/8/8"): (37.9, 40.4),
    ("percentile", "8/8/8"): (41.6, 44.7),
    ("omse", "8/8/8"): (42.6, 44.9),
    ("fq-vit", "8/8/8"): (47.8, 51.4),
    ("fq-vit", "8/8/4"): (47.2, 50.8),
}


def published(model: str, recipe: str, bits: str) -> float | None:
    """Return the published top-1 of a model (its name in the zoo) with a recipe at W/A/ATTN bits; None if there is none."""
    figures = TOP1.get((SAME.get(recipe, recipe), bits))
    return figures[MODELS.index(model)] if figures is not None and model in MODELS else None


def published_box_ap(detector: str, recipe: str, bits: str) -> float | None:
    """Return the published box AP of a detector (one of DETECTORS) with a recipe at W/A/ATTN bits; None if there is none."""
    figures = BOX_AP.get((SAME.get(recipe, recipe), bits))
    return figures[DETECTORS.index(detector)] if figures is not None and detector in DETECTORS else None
