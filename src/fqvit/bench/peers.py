"""List the peers: other runtimes to compare with, the modules that each needs, and which are installed.

This module imports none of these runtimes. See also: prepare.py (makes their files), worker.py (runs them).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from fqvit.errors import FqvitError


@dataclass(frozen=True)
class Peer:
    """A runtime to compare with.

    library: its name in --against   integer: whether it runs an int8 model
    needs: modules that must be installed; every peer needs torch, which builds the float model
    """

    name: str
    library: str
    needs: tuple[str, ...]
    integer: bool = False


ONNX = ("torch", "onnx")
PEERS = (
    Peer("torch fp32", "torch", ("torch",)),
    Peer("onnxruntime fp32", "onnxruntime", (*ONNX, "onnxruntime")),
    Peer("onnxruntime int8", "onnxruntime", (*ONNX, "onnxruntime"), True),
    Peer("onnxruntime int8 u8xu8", "onnxruntime", (*ONNX, "onnxruntime"), True),
    Peer("openvino fp32", "openvino", (*ONNX, "openvino")),
    Peer("openvino int8", "openvino", (*ONNX, "openvino", "nncf"), True),
)
LIBRARIES = tuple(dict.fromkeys(peer.library for peer in PEERS))


@dataclass(frozen=True)
class Skipped:
    """A peer that is not measured, and why."""

    peer: str
    reason: str


def parse(against: str) -> tuple[str, ...]:
    """Parse --against: comma-separated libraries, or none."""
    words = tuple(dict.fromkeys(word.strip() for word in against.split(",")))
    if words == ("none",):
        return ()
    for word in words:
        if word not in LIBRARIES:
            raise FqvitError(f"--against {against}: unknown peer {word!r}, expected some of {','.join(LIBRARIES)}, or none.")
    return words


def choose(libraries: Sequence[str]) -> tuple[list[Peer], list[Skipped]]:
    """Return the peers of these libraries that are installed, and the others with the command that installs them."""
    chosen, skipped = [], []
    for peer in PEERS:
        if peer.library not in libraries:
            continue
        missing = [module for module in peer.needs if not installed(module)]
        if missing:
            reason = f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}"
            skipped.append(Skipped(peer.name, reason))
        else:
            chosen.append(peer)
    return chosen, skipped


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
