"""Check the device of a float model; on the CPU, configure the memory allocator and the number of threads.

Integer programs need none of this.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from fqvit.distributed.workers import number_in
from fqvit.errors import FqvitError


def device_of(name: str) -> torch.device:
    """Return the torch device of a name: cpu, mps, cuda or cuda:N. Other devices of torch (meta, xpu, ...) are not tested."""
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]{1,4})?", name):
        raise FqvitError(f"device {name!r} is not available, expected cpu, cuda, cuda:N or mps. Use --device cpu.")
    try:
        device = torch.device(own_gpu(os.environ, torch.cuda.device_count()) if name == "cuda" else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise FqvitError(f"device {name!r} is not available on this machine. Use --device cpu.") from None
    return device


def own_gpu(environment: Mapping[str, str], count: int) -> str:
    """Return the device that plain `cuda` means on a machine with `count` GPUs.

    The workers that torchrun starts on one machine use its GPUs in turn.
    """
    rank = number_in(environment, "LOCAL_RANK")
    return "cuda" if rank is None or count == 0 else f"cuda:{rank % count}"


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory for the next layer. This affects the whole process, so only commands and scripts call it.

    Otherwise glibc returns freed memory to the kernel at every layer of a float pass, and the next layer faults it in again.
    Measured: a calibration took 1.8x the time of the float pass without this, and 1.2x with it.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl does not have it
        if mallopt is not None:
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD of malloc.h
            mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD; glibc accepts no larger value


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch with one thread. In many small operations, several threads spend most of their time waiting for each other.

    Measured for comparing two images of DeiT-Tiny on two cores shared with other processes: 50 s of CPU time with two threads
    in torch and NumPy, 4 s with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
