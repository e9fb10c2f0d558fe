"""Embedded models and images: the models load and classify, the images have the documented shapes and labels."""

from __future__ import annotations

import numpy as np
import pytest

from fqvit.errors import FqvitError
from fqvit.models import embedded
from fqvit.models.zoo import find


def test_there_are_512_distinct_calibration_images() -> None:
    images = embedded.calibration_images()
    assert images.shape == (512, 28, 28, 1)
    assert images.dtype == np.uint8
    assert len(np.unique(images.reshape(512, -1), axis=0)) == 512


def test_there_are_100_test_images_per_class() -> None:
    images, labels = embedded.test_images()
    assert images.shape == (1000, 28, 28, 1)
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert np.bincount(labels).tolist() == [100] * len(embedded.FMNIST_CLASSES)


def test_no_test_image_is_a_calibration_image() -> None:
    calibration = {image.tobytes() for image in embedded.calibration_images()}
    assert not any(image.tobytes() in calibration for image in embedded.test_images()[0])


def test_both_weight_files_together_are_at_most_4_megabytes() -> None:
    assert sum(embedded.embedded_weights(name).stat().st_size for name in embedded.MODELS) <= 4_000_000


def test_the_error_for_an_unknown_embedded_model_lists_the_known_names() -> None:
    with pytest.raises(FqvitError, match="fmnist_vit or fmnist_swin"):
        embedded.embedded_weights("fmnist_mlp")


def test_the_embedded_swin_has_shifted_windows_and_patch_merging() -> None:
    config = embedded.FMNIST_SWIN_CONFIG
    assert len(config.depths) > 1
    assert any(depth > 1 and min(config.grid(stage)) > config.window for stage, depth in enumerate(config.depths))


@pytest.mark.parametrize("name", embedded.MODELS)
def test_float16_weights_load_strictly_and_reach_91_percent(name: str) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from fqvit.models.config import ViTConfig
    from fqvit.models.swin import Swin
    from fqvit.models.vit import ViT

    weights = load_file(embedded.embedded_weights(name))
    assert {value.dtype for value in weights.values()} == {torch.float16}
    config = find(name).config
    model = (ViT(config) if isinstance(config, ViTConfig) else Swin(config)).eval()
    model.load_state_dict(weights, strict=True)  # converts to float32

    images, labels = embedded.test_images()
    mean, std = embedded.FMNIST_PREPROCESS.mean[0], embedded.FMNIST_PREPROCESS.std[0]
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    with torch.inference_mode():
        predicted = torch.cat([model((part.float() / 255 - mean) / std).argmax(1) for part in pixels.split(250)])
    assert (predicted.numpy() == labels).mean() >= 0.91
