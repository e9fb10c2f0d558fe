"""Names of torch devices that are accepted and rejected, and running on one thread."""

from __future__ import annotations

import pytest
import torch

from fqvit.errors import FqvitError
from fqvit.models.device import device_of, one_thread


def test_the_cpu_is_always_available() -> None:
    assert device_of("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["meta", "abacus", "", "cpu:0", "cuda:", "cuda:-1", "CUDA", "xpu", "cuda:99999", "cpu\n"])
def test_other_device_names_are_rejected_even_if_torch_knows_them(name: str) -> None:
    with pytest.raises(FqvitError, match="expected cpu, cuda, cuda:N or mps"):
        device_of(name)


@pytest.mark.parametrize("name", ["cuda:4321", "mps"])
def test_an_unavailable_device_is_rejected(name: str) -> None:
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has an MPS device")
    with pytest.raises(FqvitError, match="not available on this machine"):
        device_of(name)


def test_one_thread_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError), one_thread():
            assert torch.get_num_threads() == 1
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
