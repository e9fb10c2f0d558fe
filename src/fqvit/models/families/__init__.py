"""Plain torch modules of the families that are captured by the front end, with timm's module paths and parameter names.

See also: ../config.py (their sizes), build.py (from a config to a module), ../vit.py and ../swin.py (built from leaf modules).
"""
