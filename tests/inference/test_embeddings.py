"""Tests of embedding files: every format returns what was written, and damaged or foreign files give one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fqvit.errors import FqvitError
from fqvit.inference import embeddings
from fqvit.inference.embeddings import Embeddings, Info, read, storable, write, write_parts

FINGERPRINT = "0123456789abcdef" * 4
EMBEDDING = Info("embedding", "embedding", 0.5, 7, "u8", (6,))
TOKENS = Info("tokens@9", "tokens", 0.25, 300, "u16", (3, 4), (0, 1, 2, 3))
LOGITS = Info("logits", "logits", 0.125, 0, "i32", (5,))
SUFFIXES = (".npy", ".safetensors", ".parquet")


@pytest.fixture(params=SUFFIXES)
def suffix(request: pytest.FixtureRequest) -> str:
    if request.param == ".parquet":
        pytest.importorskip("pyarrow")
    found: str = request.param
    return found


def some(count: int, *infos: Info, start: int = 0) -> Embeddings:
    rng = np.random.default_rng(count + start)
    ranges = {"u8": (0, 256), "u16": (0, 65536), "i32": (-(2**31), 2**31)}
    vectors = {
        info.name: rng.integers(*ranges[info.dtype], (count, *info.shape)).astype(embeddings.formats.DTYPES[info.dtype])
        for info in infos
    }
    names = [f"sub/färbe {start + i}.jpg" for i in range(count)]
    return Embeddings(names, vectors, {info.name: info for info in infos}, "vit", FINGERPRINT)


def assert_same(found: Embeddings, expected: Embeddings) -> None:
    assert list(found.names) == list(expected.names)
    assert dict(found.info) == dict(expected.info)
    assert (found.model, found.fingerprint) == (expected.model, expected.fingerprint)
    assert list(found.vectors) == list(expected.vectors)
    for name, array in expected.vectors.items():
        assert found.vectors[name].dtype == array.dtype
        np.testing.assert_array_equal(found.vectors[name], array)


@pytest.mark.parametrize("info", [EMBEDDING, TOKENS, LOGITS], ids=lambda info: info.name)
@pytest.mark.parametrize("count", [0, 1, 9])
def test_a_file_returns_what_was_written(tmp_path: Path, suffix: str, info: Info, count: int) -> None:
    path = tmp_path / f"out{suffix}"
    write(path, some(count, info))
    assert_same(read(path), some(count, info))


def test_several_outputs_are_kept_in_order(tmp_path: Path, suffix: str) -> None:
    path, expected = tmp_path / f"out{suffix}", some(4, EMBEDDING, TOKENS, LOGITS)
    if suffix == ".npy":
        with pytest.raises(FqvitError, match="one output, got embedding, tokens@9, logits"):
            write(path, expected)
        assert not list(tmp_path.iterdir())
        return
    write(path, expected)
    assert_same(read(path), expected)


def test_parts_are_joined_in_order(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    parts = [some(3, EMBEDDING), some(0, EMBEDDING), some(2, EMBEDDING, start=3)]
    write_parts(path, parts)
    found = read(path)
    assert list(found.names) == [name for part in parts for name in part.names]
    np.testing.assert_array_equal(found.codes(), np.concatenate([part.codes() for part in parts]))


def test_equal_contents_give_equal_bytes(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"a{suffix}", some(5, EMBEDDING))
    write(tmp_path / f"b{suffix}", some(5, EMBEDDING))
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_parts_of_different_programs_are_rejected(tmp_path: Path) -> None:
    other = Embeddings(["a"], some(1, EMBEDDING).vectors, {"embedding": EMBEDDING}, "vit", "f" * 64)
    with pytest.raises(FqvitError, match="different programs"):
        write_parts(tmp_path / "out.safetensors", [some(1, EMBEDDING), other])


def test_safetensors_readers_see_plain_tensors(tmp_path: Path) -> None:
    expected = some(4, EMBEDDING, TOKENS, LOGITS)
    write(tmp_path / "out.safetensors", expected)
    tensors = load_file(tmp_path / "out.safetensors")
    for name, array in expected.vectors.items():
        np.testing.assert_array_equal(tensors[name], array)
    assert tensors["names"].tobytes().decode().split("\n") == expected.names


def test_parquet_readers_see_plain_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    expected = some(3, EMBEDDING)
    write(tmp_path / "out.parquet", expected)
    table = parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert table == {"name": expected.names, "embedding": expected.codes().tolist()}


def test_numpy_reads_the_npy_file(tmp_path: Path) -> None:
    write(tmp_path / "out.npy", some(3, EMBEDDING))
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), some(3, EMBEDDING).codes())


def test_codes_decode_with_scale_zero_and_alpha() -> None:
    found = some(2, EMBEDDING, TOKENS)
    np.testing.assert_array_equal(found.float(), (found.codes().astype(float) - 7) * 0.5)
    expected = (found.codes("tokens@9").astype(float) - 300) * 0.25 * np.array([1, 2, 4, 8])
    np.testing.assert_array_equal(found.float("tokens@9"), expected)


def test_sign_bits_decode_to_minus_one_and_one() -> None:
    info = Info("signs", "signs", 1.0, 0, "u8", (1,))
    found = Embeddings(["a"], {"signs": np.array([[0b10100000]], np.uint8)}, {"signs": info}, "vit", FINGERPRINT)
    np.testing.assert_array_equal(found.float(), [[1, -1, 1, -1, -1, -1, -1, -1]])


def test_the_error_for_an_unknown_output_names_it() -> None:
    with pytest.raises(FqvitError, match="no output 'mean', expected one of embedding, logits"):
        some(1, EMBEDDING, LOGITS).codes("mean")


def test_comparing_embeddings_of_different_programs_is_rejected() -> None:
    ours = some(1, EMBEDDING)
    ours.check_same_program(some(2, EMBEDDING), "index.npy")
    other = Embeddings(["a"], ours.vectors, ours.info, "deit", "f" * 64)
    with pytest.raises(FqvitError, match=r"index.npy: made by deit ffffffffffff, expected vit 0123456789ab"):
        ours.check_same_program(other, "index.npy")


def test_names_fit_on_one_line() -> None:
    assert storable("a/b c.jpg") == "a/b c.jpg"
    assert storable("a\nb\r\udcff") == "a\\nb\\r\\udcff"
    with pytest.raises(FqvitError, match="line break"):
        write("out.npy", Embeddings(["a\nb"], some(1, EMBEDDING).vectors, {"embedding": EMBEDDING}, "vit", FINGERPRINT))


def test_an_existing_file_survives_a_failed_write(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"out{suffix}"
    write(path, some(3, EMBEDDING))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embeddings.formats, "_little", fail)
    with pytest.raises(FqvitError, match=r"cannot be written \(No space left on device\). Free disk space"):
        write(path, some(4, EMBEDDING))
    assert_same(read(path), some(3, EMBEDDING))
    assert not list(tmp_path.glob(".*"))


def test_errors_name_a_missing_file_and_a_file_with_an_unknown_suffix(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(FqvitError, match="no such file"):
        read(tmp_path / f"out{suffix}")
    with pytest.raises(FqvitError, match=r"out.csv: unknown kind of embedding file, expected a name ending in .npy"):
        read(tmp_path / "out.csv")


def test_damaged_files_give_one_line_errors(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    write(path, some(20, EMBEDDING))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for length in (0, 1, 8, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(FqvitError) as error:
            read(path)
        assert "\n" not in str(error.value) and str(path) in str(error.value)
    for _ in range(200):
        changed = bytearray(whole)
        for at in rng.integers(0, min(len(whole), 700), 3):
            changed[at] = rng.integers(256)
        path.write_bytes(changed)
        try:
            read(path)
        except FqvitError as error:
            assert "\n" not in str(error)


def test_an_npy_file_needs_its_json_file(tmp_path: Path) -> None:
    path = tmp_path / "out.npy"
    write(path, some(2, EMBEDDING))
    about = json.loads((tmp_path / "out.json").read_text())
    for wrong in ("[]", "{", "{}", json.dumps({**about, "names": ["a"]}), json.dumps({**about, "names": [1, 2]})):
        (tmp_path / "out.json").write_text(wrong)
        with pytest.raises(FqvitError):
            read(path)
    (tmp_path / "out.json").unlink()
    with pytest.raises(FqvitError, match=r"no out.json beside it"):
        read(path)


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    write(tmp_path / "out.npy", some(1, EMBEDDING))
    np.save(tmp_path / "out.npy", np.array([object()], object), allow_pickle=True)
    with pytest.raises(FqvitError, match="not a .npy file of integers"):
        read(tmp_path / "out.npy")


def test_foreign_files_are_rejected(tmp_path: Path) -> None:
    save_file({"embedding": np.zeros((2, 6), np.uint8)}, tmp_path / "weights.safetensors")
    with pytest.raises(FqvitError, match="holds no embeddings"):
        read(tmp_path / "weights.safetensors")
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"name": ["a"]}), tmp_path / "table.parquet")
    with pytest.raises(FqvitError, match="holds no embeddings"):
        read(tmp_path / "table.parquet")


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 2), ("fingerprint", "x"), ("outputs", []), ("outputs", [{"name": "embedding"}]), ("model", 3)],
)
def test_a_wrong_description_is_rejected(tmp_path: Path, field: str, value: object) -> None:
    write(tmp_path / "out.npy", some(1, EMBEDDING))
    about = json.loads((tmp_path / "out.json").read_text())
    (tmp_path / "out.json").write_text(json.dumps({**about, field: value}))
    with pytest.raises(FqvitError):
        read(tmp_path / "out.npy")
