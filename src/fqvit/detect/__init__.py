"""Detection around the networks: boxes, proposals, cutting out, suppression, masks, images and COCO results.

numpy only, but for float.py, which runs the float networks, and the compiled RoIAlign. Boxes are x1, y1, x2, y2 in the
network's input, x2 and y2 exclusive edges: float64 [..., 4] in pixels, or, in fixed_*.py, int64 in 1/256 pixel.
"""
