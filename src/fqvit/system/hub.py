"""Find files of the Hugging Face Hub by their hf: name. Downloads go into the cache of huggingface_hub.

Only such addresses import huggingface_hub and use the network. If the hub cannot be reached within a few seconds, or if
HF_HUB_OFFLINE is set, files come from the cache. HF_ENDPOINT selects another hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fqvit.errors import FqvitError

ADDRESS = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w.-][\w./-]*))?(?:@([\w./-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")  # a revision that never changes
ENDING = ".fqvit"
WAIT_SECONDS = 3.0  # for the hub to accept a connection; huggingface_hub itself waits and retries for 23 s
REMEDY = "Check the network, or download the file elsewhere and pass its path."
_reached: set[str] = set()  # hubs that answered this process


@dataclass(frozen=True)
class Address:
    """A parsed address. text: the address as given   file: None if it names only the repository"""

    text: str
    repository: str
    file: str | None
    revision: str | None


def is_address(text: object) -> bool:
    return isinstance(text, str) and text.startswith("hf:")


def parse(text: str) -> Address:
    """Parse an address; raises FqvitError if it is not one."""
    match = ADDRESS.fullmatch(text)
    if match is None or ".." in (match[2] or "").split("/"):
        raise FqvitError(f"{text}: not a valid hf: name, expected hf:ORG/NAME or hf:ORG/NAME@REVISION.")
    return Address(text, match[1], match[2], match[3])


def local_program(path: str | os.PathLike[str]) -> Path:
    """Return the local path of a .fqvit file. A file on the hub is downloaded first.

    An address without a file name stands for the only .fqvit file of its repository.
    """
    text = os.fspath(path)
    if not is_address(text):
        return Path(text)
    address = parse(text)
    file = address.file
    if file is None:
        programs = program_names(address)
        if not programs:
            raise FqvitError(f"{text}: has no {ENDING} file. Quantize the model first: `fqvit quantize {text}`.")
        if len(programs) > 1:
            raise FqvitError(f"{text}: has {', '.join(programs)}. Choose one, such as hf:{address.repository}/{programs[0]}.")
        file = programs[0]
    found = fetch(address, file)
    if found is None:
        raise FqvitError(f"{text}: no file {file} in {address.repository}. Check the name.")
    return found


def names_program(text: str) -> bool:
    """Return whether a text is the address of a program, or of a repository that has one. Others may have a float model."""
    if not is_address(text):
        return False
    address = parse(text)
    return address.file is not None or bool(program_names(address))


def program_names(address: Address) -> list[str]:
    """Return the names of the .fqvit files of a repository, sorted; offline, of those in the cache."""
    hub = _package(address.text)
    if _use_network(hub, address):
        with _one_line(address):
            info = hub.HfApi(endpoint=_endpoint(hub)).model_info(address.repository, revision=address.revision, timeout=10)
            return sorted(file.rfilename for file in info.siblings or () if file.rfilename.endswith(ENDING))
    try:
        folder = Path(hub.snapshot_download(address.repository, revision=address.revision, local_files_only=True))
    except hub.errors.LocalEntryNotFoundError:
        raise unreachable(address) from None
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(f"*{ENDING}"))


def fetch(address: Address, name: str) -> Path | None:
    """Return the local path of one file of a repository; None if the repository has no such file."""
    hub = _package(address.text)
    fixed = address.revision is not None and COMMIT.fullmatch(address.revision) is not None
    cached = hub.try_to_load_from_cache(address.repository, name, revision=address.revision or "main")
    if isinstance(cached, str) and fixed:
        return Path(cached)
    if not _use_network(hub, address):
        if cached is None:
            raise unreachable(address)
        return Path(cached) if isinstance(cached, str) else None
    with _one_line(address):
        try:
            # huggingface_hub reads HF_ENDPOINT only when it is imported; passing it here allows setting it later.
            return Path(
                hub.hf_hub_download(address.repository, name, revision=address.revision, endpoint=os.environ.get("HF_ENDPOINT"))
            )
        except hub.errors.LocalEntryNotFoundError:  # an EntryNotFoundError as well
            raise
        except hub.errors.EntryNotFoundError:
            return None


def unreachable(address: Address) -> FqvitError:
    """Return the error for a file that is not in the cache and cannot be downloaded."""
    return FqvitError(f"{address.text}: the hub cannot be reached, and the cache does not have the file. {REMEDY}")


def check_reachable(text: str) -> None:
    """Raise FqvitError if a repository is neither in the cache nor reachable. For commands, before they import torch."""
    address = parse(text)
    hub = _package(text)
    if not _use_network(hub, address):
        folder = "--".join(("models", *address.repository.split("/")))
        if not (Path(hub.constants.HF_HUB_CACHE) / folder).is_dir():
            raise unreachable(address)


def _package(text: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise FqvitError(f"{text}: huggingface_hub is not installed. Run `pip install huggingface_hub`.") from error
    return huggingface_hub


def _endpoint(hub: Any) -> str:
    return os.environ.get("HF_ENDPOINT") or str(hub.constants.ENDPOINT)


def _use_network(hub: Any, address: Address) -> bool:
    """Return whether to ask the hub: not in offline mode, and not if it does not accept a connection within WAIT_SECONDS."""
    if hub.constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    endpoint = _endpoint(hub)
    if endpoint not in _reached and _accepts_connections(endpoint):
        _reached.add(endpoint)
    return endpoint in _reached


def _accepts_connections(endpoint: str) -> bool:
    """Return whether the hub, or the proxy to it, accepts a connection within WAIT_SECONDS."""
    # Late: the command line imports this module, and these would add 20 ms to the start of every command.
    import socket
    import threading
    import urllib.request
    from urllib.parse import urlsplit

    target = urlsplit(endpoint)
    proxy = urllib.request.getproxies().get(target.scheme)
    if proxy and not urllib.request.proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    found: list[bool] = []

    def connect() -> None:
        try:
            port = target.port or (443 if target.scheme == "https" else 80)
            with socket.create_connection((target.hostname or "", port), timeout=WAIT_SECONDS):
                found.append(True)
        except (OSError, ValueError):  # ValueError: the port is not a number
            pass

    # In a thread, because looking up a name has no timeout of its own.
    thread = threading.Thread(target=connect, name="fqvit-hub", daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    return bool(found)


@contextmanager
def _one_line(address: Address) -> Iterator[None]:
    """Turn the exceptions of huggingface_hub into one line that says what to do."""
    from huggingface_hub import errors

    text = address.text
    try:
        yield
    except errors.GatedRepoError as error:
        raise FqvitError(f"{text}: the model is gated. Accept its terms on the hub, then run `hf auth login`.") from error
    except errors.RepositoryNotFoundError as error:
        raise FqvitError(f"{text}: no such model on the hub (or it is private). Check the name.") from error
    except errors.RevisionNotFoundError as error:
        raise FqvitError(f"{text}: no revision '{address.revision}'. Leave it out to get the newest one.") from error
    except errors.LocalEntryNotFoundError as error:
        raise unreachable(address) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FqvitError(f"{text}: download failed ({first}). Try again, or download the file and pass its path.") from error
