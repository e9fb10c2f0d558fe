"""Capture any torch module as a graph of leaf modules, with torch.export.

capture.py runs the stages: export the module, read its ATen ops into a draft (read.py), rewrite the draft (rewrite.py,
fold.py), and emit leaf modules (emit.py). All decisions depend on the ops in the graph, never on the
name of the model.
"""
