"""Object detection: Mask R-CNN and Cascade Mask R-CNN on Swin, in float and in integers.

float/ and fixed/ are the float and the integer pipeline around the networks; the modules next to them serve both pipelines.
model/ has the float networks. Only model/, float/networks.py, calibrate.py and lower.py need torch.

Boxes are x1, y1, x2, y2 in coordinates of the network's input, with exclusive x2 and y2: float64 [..., 4] in pixels or, in
fixed/, int64 [..., 4] in 1/256 pixel.
"""
