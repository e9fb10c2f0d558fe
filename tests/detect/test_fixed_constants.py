"""Test the constants of integer detectors: how they are computed, and the checks that keep files from causing overflows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fqvit.data.preprocess import Preprocess
from fqvit.detect.fixed.boxes import scaled
from fqvit.detect.fixed.constants import DetectorConstants, Ratio, make_constants
from fqvit.detect.fixed.exp import softmax
from fqvit.detect.fixed.proposals import propose, refine, select_detections
from fqvit.detect.settings import DetectSettings
from fqvit.errors import FqvitError
from fqvit.ir.program import CodeInput, Header, Output

S = DetectSettings(strides=(4, 8, 16), anchor_ratios=(0.5, 1.0), stds=((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1)))


def header(*outputs: Output, roi: CodeInput | None = None) -> Header:
    size = Preprocess(64, 64, 3, 64, "bilinear", (0.5,) * 3, (0.5,) * 3)
    first, *others = outputs
    return Header(
        version=1, model="part", preprocess=size, ops=(), output=first, sites={}, recipe={}, source="", images=1,
        others=tuple(others), input=roi,
    )  # fmt: skip


def pyramid(scale: float = 0.05) -> Header:
    maps = [Output(f"map{i}", "map", 0.02 * (i + 1), 100 + i) for i in range(2)]
    scores = [Output(f"scores{i}", "scores", scale / (i + 1)) for i in range(3)]
    return header(*maps, *scores, *(Output(f"deltas{i}", "deltas", scale) for i in range(3)))


def head(kind: Any, scale: float = 0.1) -> Header:
    last = [Output("deltas", "deltas", 0.03)] if kind == "logits" else []
    return header(Output("y", kind, scale), *last, roi=CodeInput((7, 7, 16), 0.03, 90))


def constants(s: DetectSettings = S, scale: float = 0.1, stages: int = 2) -> DetectorConstants:
    return make_constants(s, pyramid(), [head("logits", scale)] * stages, [head("scores", scale)] * stages)


def test_ratios_follow_from_the_scales() -> None:
    c = constants()
    value = lambda r: r.mult / 2**r.shift  # noqa: E731
    assert (c.stages, c.maps, len(c.strides)) == (2, 2, 3)
    assert [value(r) for r in c.objectness] == pytest.approx([256 * 3, 256 * 1.5, 256])
    assert [value(r) for r in c.deltas[0]] == pytest.approx([0.05 * 2**24] * 2 + [0.05 * 2**27 / np.log(2)] * 2)
    assert value(c.box_deltas[1][3]) == pytest.approx(0.03 * 0.1 * 2**27 / np.log(2))
    assert value(c.classes[0]) == pytest.approx(0.1 / np.log(2) / 2 * 2**27), "two stages are averaged"
    assert value(c.mask_logits[0]) == pytest.approx(0.1 / np.log(2) * 2**27)
    assert value(c.box_squares[0][1]) == pytest.approx(0.04 / 0.03 / 2**22)
    assert c.anchors[1][1] == (8 * 8 * 128, 8 * 8 * 128) and c.padding == (124, 116, 104)
    assert (c.iou, c.score, c.mask) == (2**15, int(0.05 * 2**24), 2**29)


def test_constants_survive_a_json_round_trip() -> None:
    c = constants()
    assert msgspec.json.decode(msgspec.json.encode(c), type=DetectorConstants) == c
    assert all(proof.holds for proof in c.check())


@pytest.mark.parametrize(
    "change, said",
    [
        ({"strides": (4, 8, 12)}, "a stride of 12"),
        ({"strides": (4, 8)}, "2 strides for a pyramid of 3"),
        ({"long": 9000}, "up to 8192"),
        ({"stds": S.stds[:1]}, "stds of 1 stages for 2"),
        ({"anchor_scale": 1e6}, "settings: anchors of"),
    ],
)
def test_settings_unsupported_by_integer_detectors_are_rejected(change: dict[str, Any], said: str) -> None:
    with pytest.raises(FqvitError, match=said):
        constants(msgspec.structs.replace(S, **change))


def test_unsuitable_scales_and_headers_are_rejected() -> None:
    with pytest.raises(FqvitError, match=r"expected 0 to 2\^30"):
        constants(scale=1e6)
    with pytest.raises(FqvitError, match="no output of kind map"):
        make_constants(S, head("logits"), [], [])
    with pytest.raises(FqvitError, match="takes pixels"):
        make_constants(S, pyramid(), [header(*head("logits").outputs)] * 2, [head("scores")] * 2)


R = Ratio(2**30, 10)


@pytest.mark.parametrize(
    "change",
    [
        {"strides": (4, 8, 24)}, {"strides": (4, 8)}, {"strides": (4, 8, 2048)}, {"strides": ()}, {"strides": (0, 8, 16)},
        {"anchors": (((1, 1),),) * 2}, {"anchors": (((1, 1),), ((1, 1),), ((1, 1), (2, 2)))}, {"anchors": (((0, 1),),) * 3},
        {"anchors": (((1, 2**21 + 1),),) * 3}, {"anchors": ((),) * 3},
        {"areas": (-1,)}, {"areas": (2**63,)},
        {"areas": (9, 8), "box_squares": ((R,) * 3,) * 2, "mask_squares": ((R,) * 3,) * 2},
        {"areas": (1, 2, 3), "box_squares": ((R,) * 4,) * 2, "mask_squares": ((R,) * 4,) * 2},
        {"objectness": (R,)}, {"deltas": ((R,) * 4,)}, {"box_deltas": ((R,) * 4,)}, {"mask_logits": (R,)}, {"classes": ()},
        {"box_squares": ((R,),) * 2}, {"mask_squares": ((R, R),)}, {"objectness": (Ratio(2**31, 1),) * 3},
        {"objectness": (Ratio(1, 0),) * 3}, {"objectness": (Ratio(1, 63),) * 3}, {"objectness": (Ratio(-1, 5),) * 3},
        {"classes": (Ratio(2**31 - 1, 1),) * 2}, {"log_limit": -1}, {"log_limit": 2**31}, {"score": 2**24 + 1}, {"iou": -1},
        {"iou": 2**16 + 1}, {"proposals": 0}, {"detections": 10**6}, {"mask": 2**30 + 1}, {"padding": (0, 0, 256)},
        {"proposals": 10.0}, {"padding": "no"},
    ],
)  # fmt: skip
def test_constants_out_of_range_are_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(FqvitError, match="between: .* damaged"):
        msgspec.structs.replace(constants(), **change).check()


RATIOS = st.builds(Ratio, st.sampled_from([0, 1, 2**30, 2**31 - 1]), st.integers(1, 62))
INT32 = st.sampled_from([-(2**31), 2**31 - 1, 0, 1, -1, 77])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_accepted_constants_do_not_overflow(data: st.DataObject) -> None:
    four = st.tuples(RATIOS, RATIOS, RATIOS, RATIOS)
    half = st.sampled_from([1, 2**21])
    level = data.draw(st.tuples(half, half))
    c = msgspec.structs.replace(
        constants(),
        objectness=tuple(data.draw(RATIOS) for _ in range(3)),
        deltas=tuple(data.draw(four) for _ in range(3)),
        box_deltas=(data.draw(four), data.draw(four)),
        classes=(data.draw(RATIOS), data.draw(RATIOS)),
        log_limit=data.draw(st.sampled_from([0, 2**27, 8 * 2**27])),
        anchors=((level,),) * 3,
    )
    try:
        c.check()
    except FqvitError:
        return
    # numpy arrays overflow silently, so the critical sums are compared with Python integers.
    codes = np.array(data.draw(st.lists(INT32, min_size=12, max_size=12)), np.int32)
    size = (8192, 8192)
    deltas = np.tile(codes, 2).reshape(1, 1, -1)[:, :, :4]
    boxes = propose([codes[:1].reshape(1, 1, 1)] * 3, [deltas] * 3, size, c)
    whole = np.array([[0, 0, 2**21, 2**21], [5, 5, 6, 6]], np.int64)
    refined = refine(whole, codes[:6].reshape(2, 3), codes[:8].reshape(2, 4), 0, size, c)
    for some in (boxes, refined):
        assert (some >= 0).all() and (some <= 2**21).all() and (some[:, 2:] >= some[:, :2]).all()
    terms = [scaled(codes[6:12].reshape(2, 3), ratio) for ratio in c.classes]
    total = terms[0] + terms[1]
    exact = [sum((x * r.mult + (1 << r.shift - 1)) >> r.shift for r in c.classes) for x in codes[6:12].tolist()]
    assert total.ravel().tolist() == exact
    assert np.abs(softmax(total).sum(1) - 2**24).max() <= 3
    found = select_detections(whole, total, codes[:8].reshape(2, 4), size, c)
    assert (found.scores <= 2**24).all() and (found.boxes >= 0).all() and (found.boxes <= 2**21).all()
