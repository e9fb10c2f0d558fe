"""Read the images of a request: an image file as the body, a form with files, or JSON with base64 strings.

The size is checked while the body arrives, so that nothing larger than the limit is ever held in memory.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from fqvit.serve.limits import Budget, Limits, Rejected

FIELDS = 16  # maximum number of fields of a form, not counting files


@dataclass(frozen=True)
class Input:
    """The images of a request, as files, and its other fields, including those in the query string (?top=3)."""

    files: list[bytes]
    fields: Mapping[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def images_of(request: Request, limits: Limits, memory: Budget) -> AsyncIterator[Input]:
    """Read the images of a request; its bytes count as used memory until the block ends. Raises Rejected."""
    size = request.headers.get("content-length")
    if size is not None and int(size) > limits.body:  # the server has checked that it is a number
        raise _too_large(limits)
    with memory.holding(limits.body if size is None else int(size)):
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        try:
            if kind == "multipart/form-data":
                read = await _form(request, limits)
            elif kind == "application/json":
                read = _from_json(await _whole(request, limits))
            else:
                read = Input([await _whole(request, limits)])
        except ClientDisconnect:
            raise Rejected(400, "the client closed the connection before the body was complete.") from None
        files = [file for file in read.files if file]
        if not files:
            raise Rejected(400, "no image. Send an image file as the body, as a form field, or as base64 in JSON.")
        if len(files) > limits.images:
            raise Rejected(413, f"{len(files)} images, at most {limits.images} are allowed. Send several requests.")
        yield Input(files, dict(request.query_params) | dict(read.fields))


async def _limited(request: Request, limits: Limits) -> AsyncGenerator[bytes, None]:
    """Yield the parts of the body as they arrive. Raises Rejected if the body is larger than the limit."""
    received = 0
    async for part in request.stream():
        received += len(part)
        if received > limits.body:
            raise _too_large(limits)
        yield part


async def _whole(request: Request, limits: Limits) -> bytes:
    return b"".join([part async for part in _limited(request, limits)])


async def _form(request: Request, limits: Limits) -> Input:
    """Read a form. Its files are images, whatever their field names are."""
    parser = MultiPartParser(
        request.headers, _limited(request, limits), max_files=limits.images, max_fields=FIELDS, max_part_size=10_000
    )
    parser.spool_max_size = limits.body  # keep files in memory: their size is limited already
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Rejected(400, f"damaged form: {error.message}") from None
    except KeyError:  # starlette does not check that the boundary is there
        raise Rejected(400, "damaged form: the content type has no boundary.") from None
    items = form.multi_items()
    files = [await value.read() for _, value in items if isinstance(value, UploadFile)]
    return Input(files, {name: value for name, value in items if isinstance(value, str)})


def _from_json(body: bytes) -> Input:
    """Read {"input": IMAGE or [IMAGE, ...], ...}, where IMAGE is base64, with or without "data:image/png;base64,"."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Rejected(400, f"not JSON: {error}.") from None
    if not isinstance(content, dict) or "input" not in content:
        raise Rejected(400, 'expected {"input": IMAGE or [IMAGE, ...]}, where IMAGE is an image file in base64.')
    images = content.pop("input")
    return Input([_file(image) for image in (images if isinstance(images, list) else [images])], content)


def _file(text: object) -> bytes:
    if not isinstance(text, str):
        raise Rejected(400, f"input: {type(text).__name__}, expected an image file as a base64 string.")
    if text.startswith(("http:", "https:", "file:")):
        raise Rejected(400, "input: a URL. This server fetches nothing; send the image itself, in base64.")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Rejected(400, "input: not base64. Expected an image file in base64, or data:image/png;base64,...") from None


def _too_large(limits: Limits) -> Rejected:
    return Rejected(413, f"the body has more than {limits.body} bytes, which is the limit of this server.")
