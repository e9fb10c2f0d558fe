"""Key maps, one file per group of layouts: each renames the keys of a checkpoint to timm's.

A key map takes the named tensors and returns them under timm's names; `origin` maps each new name to the old one. Keys that a
vision model does not use (text towers, decoders, buffers) are left out; unknown keys are kept, so that later errors name them.
"""
