"""Programs on the Hugging Face Hub, with a local stand-in for the hub and without a network."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fqvit
from fqvit.errors import FqvitError
from fqvit.system import hub as hub_files
from fqvit.system.hub import local_program, names_program, parse
from tests.cli.command_line import assert_rejected
from tests.cli.command_line import fqvit as command
from tests.stand_in_hub import COMMIT, Hub

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
PROGRAM = (GOLDEN / "fqvit_v1.fqvit").read_bytes()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    stand_in = Hub()
    monkeypatch.setenv("HF_ENDPOINT", stand_in.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_files, "_reached", set())
    stand_in.repositories["a/one"] = {"README.md": b"hello", "model.fqvit": PROGRAM}
    stand_in.repositories["a/two"] = {"w4.fqvit": PROGRAM, "w8.fqvit": PROGRAM}
    stand_in.repositories["a/none"] = {"config.json": b"{}"}
    yield stand_in
    stand_in.stop()


@pytest.mark.parametrize(
    "address", ["hf:a/one", "hf:a/one@v1", f"hf:a/one@{COMMIT}", "hf:a/one/model.fqvit", "hf:a/two/w8.fqvit@main"]
)
def test_a_program_on_the_hub_is_downloaded_and_loaded(hub: Hub, address: str) -> None:
    path = local_program(address)
    assert path.read_bytes() == PROGRAM and path.suffix == ".fqvit"
    assert fqvit.load(address).fingerprint == fqvit.load(GOLDEN / "fqvit_v1.fqvit").fingerprint


def test_other_paths_use_neither_the_network_nor_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_files, "_package", lambda text: pytest.fail("huggingface_hub was imported"))
    assert local_program("a/b.fqvit") == local_program(Path("a/b.fqvit")) == Path("a/b.fqvit")
    assert not names_program("deit_tiny")


def test_commands_take_addresses_wherever_they_take_files(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fingerprint = fqvit.load("hf:a/one").fingerprint
    assert command("inspect", "hf:a/one", "--json").json["fingerprint"] == fingerprint
    assert command("export", "hf:a/one@v1", "--to", "c", "--json").json["out"] == "model_c"
    assert command("card", "hf:a/two/w4.fqvit", "--json").json["fingerprint"] == fingerprint
    assert_rejected(command("inspect", "hf:a/two"), "hf:a/two: has w4.fqvit, w8.fqvit. Choose one, such as hf:a/two/w4.fqvit")
    assert_rejected(command("detect", "predict", "hf:a/one", "x.png"), "not a detector")
    assert_rejected(command("eval", "hf:a/one"), "no images given")  # the program was found


def test_repositories_with_and_without_programs_are_told_apart(hub: Hub) -> None:
    assert names_program("hf:a/one") and names_program("hf:a/two") and not names_program("hf:a/none")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf:a/none", "has no .fqvit file. Quantize the model first: `fqvit quantize hf:a/none`"),
        ("hf:a/two", "has w4.fqvit, w8.fqvit. Choose one"),
        ("hf:a/one/other.fqvit", "no file other.fqvit in a/one"),
        ("hf:a/nothing", "no such model on the hub"),
        ("hf:a/one@v9", "no revision 'v9'"),
        ("hf:one", "expected hf:ORG/NAME"),
        ("hf:a/one/../two", "expected hf:ORG/NAME"),
    ],
)
def test_mistakes_are_reported_in_one_line(hub: Hub, address: str, message: str) -> None:
    with pytest.raises(FqvitError) as caught:
        local_program(address)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_cache_is_used_without_a_network_and_in_offline_mode(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FqvitError, match="the cache does not have the file"):
        local_program("hf:a/one")
    assert hub.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    found = local_program("hf:a/one")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    count = len(hub.requests)
    assert local_program("hf:a/one") == local_program("hf:a/one/model.fqvit") == found
    assert len(hub.requests) == count
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.stop()
    hub_files._reached.clear()
    assert local_program("hf:a/one") == found
    assert names_program("hf:a/one")
    with pytest.raises(FqvitError, match="the hub cannot be reached"):
        local_program("hf:a/two/w4.fqvit")


def test_a_commit_that_is_in_the_cache_needs_no_request(hub: Hub) -> None:
    address = f"hf:a/one/model.fqvit@{COMMIT}"
    found, count = local_program(address), len(hub.requests)
    assert local_program(address) == found and len(hub.requests) == count


def test_an_unreachable_hub_is_reported_within_five_seconds(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Try a hub that refuses connections, one whose host name is unknown, and one that never answers."""
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen(0)
    fillers = [socket.socket() for _ in range(3)]  # fill the queue of the silent hub, so that no more connections are accepted
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(silent.getsockname())
    for endpoint in ("http://127.0.0.1:9", "http://hub.invalid", f"http://127.0.0.1:{silent.getsockname()[1]}"):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        for words in (("inspect", "hf:a/b"), ("quantize", "hf:a/b", "--calib", "."), ("eval", "hf:a/b"), ("check", "hf:a/b")):
            start = time.monotonic()
            assert_rejected(command(*words), "hf:a/b: the hub cannot be reached")
            assert time.monotonic() - start < 5
    for each in (silent, *fillers):
        each.close()


def test_a_proxy_is_contacted_instead_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", hub.address)
    monkeypatch.setenv("no_proxy", "")
    assert hub_files._accepts_connections("http://hub.invalid")
    monkeypatch.setenv("no_proxy", "hub.invalid")
    assert not hub_files._accepts_connections("http://hub.invalid")


def test_addresses_are_parsed() -> None:
    found = parse("hf:a/b/c/d.fqvit@v1/x")
    assert (found.repository, found.file, found.revision) == ("a/b", "c/d.fqvit", "v1/x")
    assert (parse("hf:a/b").file, parse("hf:a/b").revision) == (None, None)
