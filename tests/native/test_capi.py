"""Test the C API: compile native/test/capi_test.c as C99 and run it; call the library through ctypes.

The results of ctypes are compared with those of Program, Preprocess.apply and the reference.
"""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from fqvit import _native
from fqvit.ir.file import PROGRAM, container, encode_header
from fqvit.ir.program import Program
from fqvit.runtime.reference import Reference
from tests.detect.test_programs import packed, some_codes
from tests.factories import assert_same
from tests.native import capi
from tests.native.capi import Api, LibraryError, Model, Options
from tests.native.compilers import NATIVE, run, tool
from tests.native.golden import GOLDEN, NAMES, write_golden
from tests.native.library import Library

C99 = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror")
HEADER = NATIVE / "include" / "fqvit.h"


@pytest.fixture(scope="module")
def api(library: Library) -> Api:
    return Api(library.shared)


def program(name: str = "tiny_v1") -> Program:
    return Program.load(GOLDEN / f"{name}.fqvit")


def encoded(program: Program) -> bytes:
    return container(PROGRAM, encode_header(program.header), program.fingerprint(), program.constants)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_a_c99_program_gets_the_golden_bits_and_every_error(library: Library, tmp_path: Path, compiler: str) -> None:
    write_golden(tmp_path)
    test = Library(library.prefix, tool(compiler), library.cxx).compile(
        NATIVE / "test" / "capi_test.c", tmp_path / "capi_test", *C99
    )
    *isas, last = run(test, tmp_path, *NAMES).splitlines()
    assert isas == _native.instruction_sets()
    assert re.fullmatch(r"\d{4,} passed, 0 failed", last)


def test_the_c99_program_is_clean_under_valgrind(library: Library, tmp_path: Path) -> None:
    valgrind = tool("valgrind")
    write_golden(tmp_path)
    test = library.compile(NATIVE / "test" / "capi_test.c", tmp_path / "capi_test", *C99)
    run(valgrind, "-q", "--leak-check=full", "--error-exitcode=9", test, tmp_path, "tiny_v1")


@pytest.mark.parametrize("language, standard", [("c", "c99"), ("c", "c17"), ("c++", "c++98"), ("c++", "c++20")])
def test_the_header_is_self_contained(language: str, standard: str, tmp_path: Path) -> None:
    flags = ("-x", language, f"-std={standard}", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    source = tmp_path / "source"
    source.write_text(f'#include "{HEADER}"\nfqvit_options options = FQVIT_OPTIONS_INIT;\n')
    for compiler in ("gcc", "clang"):
        run(tool(compiler), *flags, source)


def test_only_functions_of_the_header_are_exported(library: Library) -> None:
    exported = {line.split()[-1] for line in run(tool("nm"), "-D", "--defined-only", library.shared).splitlines()}
    declared = set(re.findall(r"\b(fqvit_\w+)\(", re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)))
    assert exported == declared


def test_the_abi_version_is_that_of_the_library_file(library: Library, api: Api) -> None:
    abi = api.lib.fqvit_abi_version()
    assert f"#define FQVIT_ABI_VERSION {abi}\n" in HEADER.read_text()
    assert f"libfqvit.so.{abi}" in run(tool("readelf"), "-d", library.shared)
    assert api.lib.fqvit_version().decode() == _native.version


@pytest.mark.parametrize("name", NAMES)
def test_a_description_has_the_values_that_python_reads(api: Api, name: str) -> None:
    expected, model = program(name), Model(api, GOLDEN / f"{name}.fqvit")
    header, found = expected.header, model.describe()
    assert found.model.decode() == header.model and found.source.decode() == header.source
    assert json.loads(found.recipe) == header.recipe
    assert found.header == encode_header(header)
    assert found.fingerprint.decode() == expected.fingerprint()
    assert found.instruction_set.decode() == _native.instruction_sets()[0] and found.threads == 1
    assert found.outputs == len(header.outputs) and found.calibration_images == header.images
    assert (found.resize, found.interpolation.decode()) == (header.preprocess.resize, header.preprocess.interpolation)
    native = _native.load_file(os.fsencode(GOLDEN / f"{name}.fqvit"), 1, "", False, 1 << 30)
    assert (found.weight_bytes, found.run_bytes) == (native.constant_bytes, native.run_bytes)
    assert model.classes() == (expected.classes or ()) and found.classes == len(expected.classes or ())
    given, want = model.input(), header.preprocess
    assert (given.name, given.kind, given.dtype, given.axes) == (b"pixels", b"pixels", 0, 3)
    assert tuple(given.shape) == (want.height, want.width, want.channels, 0, 0, 0, 0, 0)
    assert given.bytes == want.height * want.width * want.channels
    assert (given.scale, given.zero_point, bool(given.alpha)) == (0.0, 0, False)
    check_outputs(expected, model)


def check_outputs(expected: Program, model: Model) -> None:
    values = expected.verify().buffers
    for i, want in enumerate(expected.header.outputs):
        found, value = model.output(i), values[want.buffer]
        assert (found.name.decode(), found.kind.decode(), found.output_name.decode()) == (want.buffer, want.kind, want.label)
        assert (found.scale, found.zero_point) == (want.scale, want.zero)
        assert ("u8", "u16", "i32")[found.dtype] == value.dtype
        assert tuple(found.shape[: found.axes]) == value.shape and not any(found.shape[found.axes :])
        assert found.bytes == np.prod(value.shape) * np.dtype(capi.DTYPES[found.dtype]).itemsize
        if want.alpha is None:
            assert not found.alpha
        else:
            assert_same(np.ctypeslib.as_array(found.alpha, (value.shape[-1],)), expected.constants[want.alpha], "alpha")


@pytest.mark.parametrize("path", sorted((GOLDEN / "outputs").glob("*.fqvit")), ids=lambda path: path.stem)
def test_named_outputs_have_the_golden_bits(api: Api, path: Path) -> None:
    expected, model = np.load(path.with_suffix(".npz")), Model(api, path)
    check_outputs(Program.load(path), model)
    for i, found in enumerate(model.run_all(expected["images"])):
        assert_same(found, expected[f"output{i}"], f"{path.stem}: output {i}")
    with pytest.raises(LibraryError, match=f"outputs: 1, expected {i + 1}"):
        api.call("run_all", model.handle, None, capi.c_size_t(0), None, None, 1)


def test_alpha_is_returned_for_features(api: Api) -> None:
    assert program("tokens_v1").header.output.alpha is not None
    assert Model(api, GOLDEN / "tokens_v1.fqvit").output(0).alpha


def test_the_parts_of_a_detector_have_several_outputs_and_codes_as_input(api: Api) -> None:
    low = packed()
    for part in (low.pyramid(32, 64), low.boxes[0]):
        model, images = Model(api, encoded(part)), some_codes(part, 3)
        check_outputs(part, model)
        for i, (found, want) in enumerate(zip(model.run_all(images), Reference(part).run_all(images), strict=True)):
            assert_same(found, want, f"output {i}")
    codes, given = part.header.input, model.input()
    assert codes is not None
    assert (given.kind, given.scale, given.zero_point) == (b"codes", codes.scale, codes.zero)
    assert tuple(given.shape[:3]) == codes.shape
    with pytest.raises(LibraryError, match="model: takes codes, expected one that takes pixels") as found:
        model.preprocess(np.zeros((4, 4, 3), np.uint8))
    assert found.value.status == capi.ARGUMENT


@pytest.mark.parametrize("name", ["tiny_v1", "swin_v1"])
def test_preprocessing_equals_that_of_python(api: Api, name: str) -> None:
    model, preprocess = Model(api, GOLDEN / f"{name}.fqvit"), program(name).header.preprocess
    rng = np.random.default_rng(3)
    for height, width, channels in [(30, 41, 3), (200, 100, 3), (7, 9, 1), (64, 48, 4), (1, 1, 3), (12, 12, 3)]:
        pixels = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
        want = preprocess.apply(Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels))
        assert_same(model.preprocess(pixels), want, f"{pixels.shape}")
        padded = np.zeros((height, width * channels + 5), np.uint8)
        padded[:, : width * channels] = pixels.reshape(height, -1)
        strided = np.lib.stride_tricks.as_strided(padded, pixels.shape, (padded.shape[1], channels, 1))
        assert_same(model.preprocess(strided, padded.shape[1]), want, f"{pixels.shape} with a stride")


def test_class_names_that_are_not_utf8_are_decoded_as_in_python(api: Api) -> None:
    names = b"a\n\xff\xfe\n\xe2\x82\n\xf0\x9f\x98\x80\xed\xa0\x80\n\xc3\xa9\x80"
    hostile = program()
    hostile = Program(hostile.header, {**hostile.constants, "classes": np.frombuffer(names, np.uint8)})
    assert Model(api, encoded(hostile)).classes() == tuple(names.decode("utf-8", "replace").split("\n"))


def test_unusable_files_give_a_one_line_error(api: Api, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    good = (GOLDEN / "tiny_v1.fqvit").read_bytes()
    for name, data in {"empty": b"", "short": good[:-1], "long": good + b"x", "bits": good[:-9] + bytes(9)}.items():
        (tmp_path / name).write_bytes(data)
    for path, status, text in [
        (tmp_path / "absent", capi.FILE, "no such file. Check the path."),
        (tmp_path, capi.FILE, "not a regular file. Check the path."),
        (tmp_path / "fifo", capi.FILE, "not a regular file. Check the path."),
        (tmp_path / "empty", capi.PROGRAM, "not a .fqvit file, expected one written by `fqvit quantize`. Check the path."),
        (tmp_path / "short", capi.PROGRAM, "damaged or truncated, expected a complete .fqvit file. Quantize again."),
        (tmp_path / "long", capi.PROGRAM, "damaged or truncated, expected a complete .fqvit file. Quantize again."),
        (tmp_path / "bits", capi.PROGRAM, "the fingerprint does not match the contents. The file is damaged."),
        (GOLDEN / "detectors" / "cascade_v1.fqvit", capi.PROGRAM, "holds a detector, not a classifier."),
    ]:
        with pytest.raises(LibraryError) as found:
            Model(api, path)
        assert found.value.status == status
        assert str(found.value).startswith(f"{path}: ") and text in str(found.value), str(found.value)
        assert len(str(found.value).splitlines()) == 1 and str(found.value).endswith(".")


def test_a_file_can_have_any_name_that_the_system_allows(api: Api, tmp_path: Path) -> None:
    path = tmp_path / "mö\u2028 \U0001f600.fqvit"
    path.write_bytes((GOLDEN / "tiny_v1.fqvit").read_bytes())
    assert Model(api, path).describe().classes == 5


def test_errors_are_one_line_of_utf8_whatever_a_path_contains(api: Api) -> None:
    handle = capi.c_void_p()
    for path in (
        b"a\nb\x1b[1m\xff\xc2\x85\xe2\x80\xa8c",
        "é".encode() * 3000,
        b"x" * 350 + "é€😀".encode() * 30,
        b"\xff" * 900,
    ):
        assert api.lib.fqvit_model_load(path, None, capi.byref(handle)) == capi.FILE
        text = api.error()  # decodes as UTF-8
        assert len(text.splitlines()) == 1 and text.isprintable() and text.endswith(".") and ": " in text
    assert api.lib.fqvit_model_load(b"a\nb\x1b[1m\xff\xc2\x85\xe2\x80\xa8c", None, capi.byref(handle)) == capi.FILE
    assert api.error().startswith("a b [1m\ufffd  c: no such file. Check the path")


def test_an_error_that_is_longer_than_the_buffer_is_cut_between_characters(api: Api) -> None:
    long = program()
    header = msgspec.structs.replace(long.header, output=msgspec.structs.replace(long.header.output, buffer="é" * 2000))
    with pytest.raises(LibraryError) as found:
        Model(api, encoded(Program(header, long.constants)))
    assert found.value.status == capi.PROGRAM
    assert 1000 < len(str(found.value).encode()) < 1024


def test_the_last_error_belongs_to_its_thread(api: Api, tmp_path: Path) -> None:
    with pytest.raises(LibraryError):
        Model(api, tmp_path / "of this thread")
    seen = []
    thread = threading.Thread(target=lambda: seen.append(api.error()))
    thread.start()
    thread.join()
    assert seen == [""] and "of this thread" in api.error()


def test_unknown_options_of_a_newer_caller_are_accepted_if_they_are_zero(api: Api) -> None:
    class Newer(capi.ctypes.Structure):
        _fields_ = (("known", Options), ("added", capi.c_uint64))

    newer = Newer(Options(capi.ctypes.sizeof(Newer), 2, b"scalar", 0), 0)
    model = Model(api, GOLDEN / "tiny_v1.fqvit", newer.known)
    assert (model.describe().threads, model.describe().instruction_set) == (2, b"scalar")
