"""Detection around the networks: boxes, proposals, cutting out, suppression, masks, images and COCO results.

numpy only, but for float.py, which runs the float networks. Boxes are float64 [..., 4]: x1, y1, x2, y2 in pixels of the
network's input, x2 and y2 exclusive edges.
"""
