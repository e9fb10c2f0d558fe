"""Settings of a model that its tensors do not show, with their source: arguments, config files, a live module or a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fqvit.errors import FqvitError
from fqvit.models.config import Activation, Pool
from fqvit.models.transform import Transform, merged

UNKNOWN = Transform()


def words(text: str) -> frozenset[str]:
    """Return the set of words in a text: field names, separated by spaces or line breaks."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Hints:
    """The settings that are known; None for all others.

    heads: one number, or one per stage of a Swin   image: height and width that the weights were made for
    sizes: width, depth, hidden, patch, channels, registers; the tensors must have the same sizes
    unused: prefixes of timm names that the model class does not use, such as the norm that CLIP's classifier skips
    antialias: resample position embeddings with antialiasing, as timm does; transformers does so only for DINOv2 with registers
    resizable: transformers resamples the position embeddings to the size of the image, so the size in
    preprocessor_config.json applies
    exact: nothing in timm's config.json (model_args, global_pool) changes the structure of `architecture`, so the tensors
    must have exactly that structure
    source: where the settings come from, for messages
    """

    heads: tuple[int, ...] | None = None
    eps: float | None = None
    image: tuple[int, int] | None = None
    labels: tuple[str, ...] | None = None
    pool: Pool | None = None
    activation: Activation | None = None
    qkv_bias: bool | None = None
    theta: float | None = None
    windows: tuple[int, ...] | None = None
    pretrained_windows: tuple[int, ...] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    antialias: bool = True
    resizable: bool = False
    transform: Transform = UNKNOWN
    architecture: str | None = None
    model_type: str | None = None
    exact: bool = False
    source: str = ""


# Settings that are also arguments of load_model. If two sources give one of them, they must agree.
DECIDED = ("heads", "pool", "activation", "qkv_bias")


def agreed(first: Hints, second: Hints, label: str) -> Hints:
    """Merge two sets of hints; the first takes precedence. Raises FqvitError if they differ in a setting of DECIDED."""
    values: dict[str, Any] = {}
    for name in ("heads", "eps", "image", "labels", "pool", "activation", "qkv_bias", "theta", "windows", "pretrained_windows"):
        one, other = getattr(first, name), getattr(second, name)
        if name in DECIDED and one is not None and other is not None and one != other:
            shown, expected = (value[0] if isinstance(value, tuple) and len(value) == 1 else value for value in (one, other))
            raise FqvitError(
                f"{label}: {name} is {shown!r} in {first.source}, but {expected!r} in {second.source}. Leave one of them out."
            )
        values[name] = one if one is not None else other
    return replace(
        second,
        **values,
        sizes={**second.sizes, **first.sizes},
        unused=(*first.unused, *second.unused),
        transform=merged(first.transform, second.transform),
        architecture=first.architecture or second.architecture,
        model_type=first.model_type or second.model_type,
        antialias=first.antialias and second.antialias,
        resizable=first.resizable or second.resizable,
        exact=first.exact or second.exact,
    )
