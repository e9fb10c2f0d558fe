"""The 80 COCO categories, id -> name, in the order of the logits of COCO detectors."""

from __future__ import annotations

_NAMES = (
    "person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, -, stop sign,"
    " parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, -, backpack, umbrella, -, -,"
    " handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard,"
    " surfboard, tennis racket, bottle, -, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange,"
    " broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, -, dining table, -, -, toilet, -, tv,"
    " laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, -, book, clock, vase,"
    " scissors, teddy bear, hair drier, toothbrush"
)

# Ids start at 1; a dash marks an id that COCO does not use.
COCO_CATEGORIES = {number: name for number, name in enumerate(_NAMES.split(", "), 1) if name != "-"}
