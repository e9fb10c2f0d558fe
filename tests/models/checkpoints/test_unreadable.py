"""Checkpoint files that cannot be read: the error distinguishes damage, lack of memory, I/O errors and unsupported versions."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from fqvit.errors import FqvitError
from fqvit.models.checkpoints.checkpoint import read_checkpoint


def test_torchscript_is_rejected_and_not_run(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that torch.export should be used instead
        torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)).save(tmp_path / "w.pt")
    with pytest.raises(FqvitError, match=r"w\.pt: is a TorchScript program.*Save model\.state_dict\(\) instead"):
        read_checkpoint(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you"),
            "not enough memory",
        ),
        (MemoryError(), "not enough memory"),
        (OSError(12, "Cannot allocate memory"), "not enough memory"),
        (OSError(5, "Input/output error"), r"cannot be read \(Input/output error\)"),
        (RuntimeError("file with version 99, but the maximum supported version for reading is 10."), "newer torch than"),
        (
            RuntimeError("PytorchStreamReader failed:\n" + 99 * "x"),
            r"damaged or truncated \(PytorchStreamReader failed: x+\.\.\.\)",
        ),
        (EOFError(), r"damaged or truncated \(EOFError\)"),
    ],
)
def test_read_errors_are_classified(error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    torch.save({"head.bias": torch.zeros(3)}, tmp_path / "w.pth")
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(FqvitError, match=message) as caught:
        read_checkpoint(tmp_path / "w.pth")
    assert "\n" not in str(caught.value) and ("Download it again" in str(caught.value)) == ("damaged" in str(caught.value))
