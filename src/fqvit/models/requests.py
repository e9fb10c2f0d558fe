"""Parse the names of outputs: a name, a layer and modifiers, such as embedding:l2 or tokens@9.

    NAME[@LAYER][:MODIFIER...]

Imports no torch, so that the command line can reject a name at once. See also: outputs.py (finds the outputs in a graph),
docs/how-to/extract-features.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fqvit.errors import FqvitError

NAMES = ("logits", "embedding", "class", "mean", "tokens")
LAYERED = ("class", "mean", "tokens")  # names that may have a layer
WIDTHS = {"u8": 8, "u16": 16}
MODIFIERS = (*WIDTHS, "i32", "l2", "sign")
MAX_OUTPUTS = 64


@dataclass(frozen=True)
class Request:
    """One output that a user asks for. layer: the number of a block, from 0, or from the end if negative; None: the last norm

    modifiers: in the order of MODIFIERS
    """

    name: str
    layer: int | None = None
    modifiers: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The request as text: the name of the output in a file."""
        layer = "" if self.layer is None else f"@{self.layer}"
        return ":".join((self.name + layer, *self.modifiers))

    @property
    def bits(self) -> int | None:
        """The number of bits per code, if the request specifies it."""
        return next((bits for width, bits in WIDTHS.items() if width in self.modifiers), None)


def parse_outputs(wanted: str | Sequence[str]) -> tuple[Request, ...]:
    """Parse a list of outputs, given as strings or as one comma-separated string. Raises FqvitError for invalid names."""
    texts = wanted.split(",") if isinstance(wanted, str) else list(wanted)
    found = tuple(_parse(text.strip()) for text in texts)
    if len(found) > MAX_OUTPUTS:
        raise FqvitError(f"outputs: {len(found)} names, expected at most {MAX_OUTPUTS}.")
    check_different(found)
    return found


def check_different(requests: Sequence[Request]) -> None:
    """Raise FqvitError if two requests are the same."""
    labels = [request.label for request in requests]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise FqvitError(f"output {twice}: listed twice. Leave one out.")


def _parse(text: str) -> Request:
    place, *modifiers = text.split(":")
    name, at, layer = place.partition("@")
    if name not in NAMES:
        raise FqvitError(f"output {text!r}: unknown name, expected {_either(NAMES)}, such as tokens@9 or embedding:l2.")
    if at and name not in LAYERED:
        raise FqvitError(f"output {text!r}: {name} has no layers, expected {_either(LAYERED)} before @.")
    if at and not re.fullmatch(r"-?\d{1,4}", layer):
        raise FqvitError(f"output {text!r}: layer {layer!r}, expected the number of a block, from 0; -1 is the last one.")
    unknown = next((modifier for modifier in modifiers if modifier not in MODIFIERS), None)
    if unknown is not None:
        raise FqvitError(f"output {text!r}: unknown modifier {unknown!r}, expected {_either(MODIFIERS)}.")
    request = Request(name, int(layer) if at else None, tuple(m for m in MODIFIERS if m in modifiers))
    _check_modifiers(text, request, modifiers)
    return request


def _check_modifiers(text: str, request: Request, given: Sequence[str]) -> None:
    """Reject modifiers that are repeated or exclude each other."""
    modifiers = request.modifiers
    if len(given) > len(modifiers):
        raise FqvitError(f"output {text!r}: a modifier is listed twice. Leave one out.")
    if request.name == "logits" and set(modifiers) - {"i32"}:
        other = next(modifier for modifier in modifiers if modifier != "i32")
        raise FqvitError(f"output {text!r}: logits are always i32. Leave out {other}, or use embedding.")
    if request.name == "tokens" and "sign" in modifiers:
        raise FqvitError(f"output {text!r}: sign bits are for one vector per image, expected embedding, class or mean.")
    if len([m for m in modifiers if m in ("u8", "u16", "i32")]) > 1:
        raise FqvitError(f"output {text!r}: more than one of u8, u16 and i32. Keep one.")
    if "i32" in modifiers and len(modifiers) > 1:
        raise FqvitError(f"output {text!r}: i32 is the accumulator itself. Leave out {modifiers[-1]}.")
    if "sign" in modifiers and len(modifiers) > 1:
        raise FqvitError(f"output {text!r}: sign cannot be combined with other modifiers. Leave out {modifiers[0]}.")


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
