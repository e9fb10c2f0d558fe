"""Call libfqvit through ctypes: the structs and functions of native/include/fqvit.h."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

OK, ARGUMENT, FILE, PROGRAM, MEMORY, INTERNAL = range(6)
DTYPES = (np.uint8, np.uint16, np.int32)


class Options(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("threads", c_uint32), ("instruction_set", c_char_p), ("max_run_bytes", c_uint64)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p), ("kind", c_char_p), ("dtype", c_int), ("axes", c_uint32), ("shape", c_int64 * 8),
        ("bytes", c_uint64), ("scale", c_double), ("zero_point", c_int64), ("alpha", POINTER(c_uint8)),
        ("output_name", c_char_p),
    ]  # fmt: skip


class Image(ctypes.Structure):
    _fields_ = [
        ("pixels", c_void_p), ("width", c_uint32), ("height", c_uint32), ("channels", c_uint32), ("stride", c_uint64),
    ]  # fmt: skip


class Description(ctypes.Structure):
    _fields_ = [
        ("model", c_char_p), ("source", c_char_p), ("recipe", c_char_p), ("header", c_char_p), ("fingerprint", c_char_p),
        ("instruction_set", c_char_p), ("threads", c_uint32), ("outputs", c_uint32), ("classes", c_uint32),
        ("calibration_images", c_uint64), ("weight_bytes", c_uint64), ("run_bytes", c_uint64), ("resize", c_uint32),
        ("interpolation", c_char_p),
    ]  # fmt: skip


class LibraryError(Exception):
    """A failed call: its status and the last error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Api:
    """The functions of the shared library."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        for name in ("last_error", "version", "instruction_set", "model_class_name"):
            getattr(self.lib, f"fqvit_{name}").restype = c_char_p

    def error(self) -> str:
        return str(self.lib.fqvit_last_error().decode())

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.lib, f"fqvit_model_{name}")(*arguments)
        if status != OK:
            raise LibraryError(status, self.error())


class Model:
    """A loaded model: its handle, and the functions that take it."""

    def __init__(self, api: Api, file: Path | bytes, options: Options | None = None) -> None:
        self.api, self.handle = api, c_void_p(0x1234)
        chosen = None if options is None else byref(options)
        try:
            if isinstance(file, bytes):
                api.call("load_memory", file, c_size_t(len(file)), chosen, byref(self.handle))
            else:
                api.call("load", str(file).encode(), chosen, byref(self.handle))
        except LibraryError:
            assert self.handle.value is None
            raise

    def __del__(self) -> None:
        self.api.lib.fqvit_model_free(self.handle)

    def describe(self) -> Description:
        out = Description()
        self.api.call("describe", self.handle, byref(out), c_size_t(ctypes.sizeof(out)))
        return out

    def input(self) -> Tensor:
        out = Tensor()
        self.api.call("input", self.handle, byref(out), c_size_t(ctypes.sizeof(out)))
        return out

    def output(self, i: int) -> Tensor:
        out = Tensor()
        self.api.call("output", self.handle, c_uint32(i), byref(out), c_size_t(ctypes.sizeof(out)))
        return out

    def classes(self) -> tuple[str, ...]:
        count = self.describe().classes
        return tuple(self.api.lib.fqvit_model_class_name(self.handle, c_uint32(i)).decode() for i in range(count))

    def preprocess(self, pixels: NDArray[np.uint8], stride: int = 0) -> NDArray[np.uint8]:
        """Prepare an image u8 [H, W, C], whose rows may be `stride` bytes apart."""
        height, width, channels = pixels.shape
        shape = self.input()
        out = np.empty(tuple(shape.shape[:3]), np.uint8)
        image = Image(pixels.ctypes.data, width, height, channels, stride)
        self.api.call("preprocess", self.handle, byref(image), c_void_p(out.ctypes.data), c_size_t(out.nbytes))
        return out

    def run_all(self, images: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
        tensors = [self.output(i) for i in range(self.describe().outputs)]
        ys = [np.empty((len(images), *t.shape[: t.axes]), DTYPES[t.dtype]) for t in tensors]
        pointers = (c_void_p * len(ys))(*(y.ctypes.data for y in ys))
        sizes = (c_size_t * len(ys))(*(y.nbytes for y in ys))
        data, count = c_void_p(images.ctypes.data), c_size_t(len(images))
        self.api.call("run_all", self.handle, data, count, pointers, sizes, c_uint32(len(ys)))
        return tuple(ys)
