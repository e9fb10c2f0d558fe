"""Rename the keys of a checkpoint by a table of (pattern, name) pairs, and concatenate q, k and v as timm does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fqvit.errors import FqvitError

Table = Sequence[tuple[str, str]]
P = r"(weight|bias)"


@dataclass
class Renamed:
    """tensors: timm name -> value   origin: timm name -> name in the checkpoint"""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: Tensor, old: str) -> None:
        self.tensors[name], self.origin[name] = value, old

    def change(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the tensor of this name, if there is one."""
        if name in self.tensors:
            self.tensors[name] = function(self.tensors[name])


def first_match(table: Table, key: str) -> str | None:
    for pattern, name in table:
        if match := re.fullmatch(pattern, key):
            return match.expand(name)
    return None


def rename(tensors: dict[str, Tensor], table: Table, dropped: str, label: str) -> Renamed:
    """Rename by the first matching pattern. dropped: pattern of keys that are left out"""
    out = Renamed()
    for key, value in tensors.items():
        if re.search(dropped, key):
            continue
        name = first_match(table, key) or key
        if name in out.tensors:
            raise FqvitError(f"{label}: '{out.origin[name]}' and '{key}' are the same tensor. Remove one of them.")
        out.add(name, value, key)
    return out


def join_qkv(found: Renamed, label: str) -> None:
    """Concatenate attn.{q,k,v}.x into attn.qkv.x, rows of q first.

    If k has no bias, the biases of q and v become attn.q_bias and attn.v_bias.
    """
    for key in list(found.tensors):
        if not (match := re.fullmatch(r"(.+\.attn)\.q\.(weight|bias)", key)):
            continue
        old = found.origin[key]
        parts = [f"{match[1]}.{part}.{match[2]}" for part in "qkv"]
        if match[2] == "bias" and parts[1] not in found.tensors and parts[2] in found.tensors:
            for part, name in ((parts[0], "q_bias"), (parts[2], "v_bias")):
                found.add(f"{match[1]}.{name}", found.tensors.pop(part), found.origin[part])
            continue
        missing = [part for part in parts if part not in found.tensors]
        if missing:
            raise FqvitError(f"{label}: lacks '{missing[0]}', needed with '{old}'. The checkpoint is incomplete.")
        thirds = [found.tensors.pop(part) for part in parts]
        if thirds[0].ndim == 0:
            raise FqvitError(f"{label}: '{old}' is a single number, expected a matrix or a vector. The file is damaged.")
        if len({third.shape for third in thirds}) > 1:
            raise FqvitError(f"{label}: the shape of '{old}' differs from that of k or v. Download the checkpoint again.")
        found.add(f"{match[1]}.qkv.{match[2]}", torch.cat(thirds), old)
