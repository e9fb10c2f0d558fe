"""Tests of C exports on other processors under QEMU: Cortex-M4, RISC-V, Arm without FPU, s390x.

The linker script gives the Cortex-M4 2 MB of flash and 512 kB of RAM. Tests are skipped without these Debian packages:
gcc-arm-none-eabi, gcc-riscv64-unknown-elf, gcc-arm-linux-gnueabi, gcc-s390x-linux-gnu, qemu-user and qemu-system-arm.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fqvit.ir.program import Program
from fqvit.models.embedded import test_images as embedded_images
from fqvit.runtime.reference import run as reference
from tests.export.compiled import STRICT, TARGETS, outputs_of, sources
from tests.factories import assert_same
from tests.native.compilers import run, tool

pytestmark = pytest.mark.nightly

CORTEX_M4 = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=soft")
BARE = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-O2", "-ffreestanding", "-nostdlib")
FLASH, RAM = 2 * 2**20, 512 * 2**10
HELPERS = re.compile(r"__aeabi_\w+|__\w+di3")  # 64-bit arithmetic in the compiler's runtime library


@pytest.fixture(scope="module")
def cortex_m4(exported_vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Link the firmware. The linker script limits memory to FLASH and RAM."""
    to = tmp_path_factory.mktemp("m4") / "model.elf"
    files = [TARGETS / "cortex_m4.c", *sources(exported_vit)]
    script = ("-T", TARGETS / "cortex_m4.ld")
    run(tool("arm-none-eabi-gcc"), *BARE, *CORTEX_M4, "-I", exported_vit, *script, *files, "-lgcc", "-o", to)
    return to


def test_the_embedded_model_fits_into_a_cortex_m4(cortex_m4: Path) -> None:
    text, data, bss = (int(size) for size in run(tool("arm-none-eabi-size"), cortex_m4).splitlines()[1].split()[:3])
    assert data == 0 and text < FLASH // 3
    assert bss + 28 * 28 < RAM // 8  # bss includes the stack of the linker script, but not the image


def test_a_cortex_m4_matches_the_reference(cortex_m4: Path, fmnist_vit: Program, tmp_path: Path) -> None:
    image = embedded_images()[0][5]
    (tmp_path / "image.rgb").write_bytes(image.tobytes())
    command = [tool("qemu-system-arm"), "-M", "mps2-an386", "-nographic", "-semihosting-config", "enable=on,target=native"]
    command += ["-kernel", str(cortex_m4), "-device", f"loader,file={tmp_path / 'image.rgb'},addr=0x21000000,force-raw=on"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, stdin=subprocess.DEVNULL)
    output = np.array((done.stdout + done.stderr).split(), np.int64)
    assert_same(output, reference(fmnist_vit, image[None])[0], "Cortex-M4")


def test_the_stack_on_a_cortex_m4_is_below_one_kilobyte(exported_vit: Path, tmp_path: Path) -> None:
    for name in ("model.c", "fqvit_ops.c"):
        object_file = tmp_path / f"{name}.o"
        flags = (*STRICT, *CORTEX_M4, "-O2", "-fstack-usage")
        run(tool("arm-none-eabi-gcc"), *flags, "-c", exported_vit / name, "-o", object_file)
        asked = run(tool("arm-none-eabi-nm"), "-u", object_file).split()
        assert [n for n in asked if n != "U" and not n.startswith(("model_", "fqvit_")) and not HELPERS.fullmatch(n)] == []
    used = sorted(int(line.split("\t")[1]) for path in tmp_path.glob("*.su") for line in path.read_text().splitlines())
    assert used and sum(used[-6:]) < 1024  # the call depth is at most six: run, stage, op and three helpers


@pytest.mark.parametrize("machine, abi", [("rv32imac", "ilp32"), ("rv64imac", "lp64")])
def test_risc_v_without_floats_matches_the_reference(
    machine: str, abi: str, exported_vit: Path, fmnist_vit: Program, tmp_path: Path
) -> None:
    compiler, qemu = tool("riscv64-unknown-elf-gcc"), tool(f"qemu-riscv{machine[2:4]}")
    # The start code is C and does not set the global pointer, which code would use after linker relaxation.
    flags = (*BARE, f"-march={machine}", f"-mabi={abi}", "-static", "-Wl,--no-relax,--no-warn-rwx-segments", "-I", exported_vit)
    run(compiler, *flags, TARGETS / "riscv.c", *sources(exported_vit), "-lgcc", "-o", tmp_path / "model")
    images = embedded_images()[0][7:8]
    assert_same(outputs_of([qemu, tmp_path / "model"], images), reference(fmnist_vit, images), machine)


@pytest.mark.parametrize(
    "compiler, qemu",
    [
        ("arm-linux-gnueabi-gcc -march=armv5te -mfloat-abi=soft", "qemu-arm"),  # no FPU, no unaligned access
        ("s390x-linux-gnu-gcc", "qemu-s390x"),  # big-endian
    ],
)
def test_other_processors_match_the_reference(
    compiler: str, qemu: str, exported_vit: Path, fmnist_vit: Program, tmp_path: Path
) -> None:
    name, *flags = compiler.split()
    emulator = tool(qemu)
    files = [TARGETS / "batch.c", *sources(exported_vit)]
    run(tool(name), *STRICT, "-O2", *flags, "-static", "-I", exported_vit, *files, "-o", tmp_path / "model")
    images = embedded_images()[0][[1, 600]]
    assert_same(outputs_of([emulator, tmp_path / "model"], images), reference(fmnist_vit, images), qemu)
