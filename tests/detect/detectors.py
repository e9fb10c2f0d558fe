"""Small detectors with random weights for tests, loaded from state dicts in the layout of released checkpoints."""

from __future__ import annotations

from dataclasses import replace

from fqvit.detect.model.detector import FloatDetector
from fqvit.detect.model.load import load_detector, random_release
from fqvit.detect.settings import DetectSettings
from fqvit.models.config import DetectorConfig, SwinConfig

SWIN = SwinConfig((64, 64), 4, 3, 0, 8, (2, 1, 2, 2), (1, 2, 4, 8), 3, fixed_window=True)
MASK_RCNN = DetectorConfig(SWIN, 5, channels=16, box_channels=16, box_width=24, mask_convs=2, mask_channels=12)
CONFIGS = {
    "mask r-cnn": MASK_RCNN,
    "cascade": replace(MASK_RCNN, stages=3, agnostic=True),
    "cascade of 4conv1fc": replace(MASK_RCNN, stages=3, box_convs=4, box_fcs=1, box_channels=20),
}
# Low thresholds, so that random weights give detections.
SETTINGS = DetectSettings(short=96, long=160, anchor_scale=4.0, finest=14.0, score=0.15, proposals_a_level=60, proposals=50)


def random_detector(name: str, settings: DetectSettings = SETTINGS) -> FloatDetector:
    return load_detector(random_release(CONFIGS[name], "mmdetection"), settings)
