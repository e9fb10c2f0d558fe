"""Read the headers of an extension for Linux, macOS or Windows and list what would prevent Python from loading it.

The files are parsed by LIEF, so an extension can be checked on a machine that cannot run it. See also: build_wheels.py, which
checks each wheel with it, and the packages auditwheel (Linux: versions of glibc) and abi3audit (the stable ABI).
"""

from __future__ import annotations

import hashlib
import re
import struct

import lief

lief.logging.disable()  # it warns about tables that a stripped library does not have

INIT = "PyInit__native"
PYTHON_NAME = re.compile(r"_?Py[A-Z_]")
MACOS_LIBRARIES = {"/usr/lib/libSystem.B.dylib"}
MACOS_OLDEST = [11, 0, 0]
DYNAMIC_LOOKUP = -2  # library ordinal: the name is looked up in everything that is loaded, such as the interpreter
# DLLs of Windows 10 and later (api-ms-win-crt-*.dll: the Universal C Runtime), and python3.dll, the stable ABI of Python.
WINDOWS_LIBRARIES = re.compile(r"kernel32\.dll|ntdll\.dll|advapi32\.dll|api-ms-win-crt-[\w-]+\.dll|python3\.dll", re.IGNORECASE)

ELF_MACHINES = {"x86_64": lief.ELF.ARCH.X86_64, "aarch64": lief.ELF.ARCH.AARCH64}
MACHO_MACHINES = {"x86_64": lief.MachO.Header.CPU_TYPE.X86_64, "arm64": lief.MachO.Header.CPU_TYPE.ARM64}


def problems(system: str, processor: str, library: bytes) -> list[str]:
    """Return what is wrong with an extension for a system (Linux, Darwin or Windows) and processor, as CMake names them."""
    return {"Linux": elf_problems, "Darwin": macho_problems, "Windows": pe_problems}[system](processor, library)


def elf_problems(processor: str, library: bytes) -> list[str]:
    binary = lief.ELF.parse(library)
    if binary is None:
        return ["not an ELF file"]
    found = []
    if binary.header.machine_type != ELF_MACHINES[processor]:
        found.append(f"compiled for {binary.header.machine_type.name}, expected {processor}")
    if INIT not in {symbol.name for symbol in binary.exported_symbols}:
        found.append(f"does not export {INIT}")
    return found


def macho_problems(processor: str, library: bytes) -> list[str]:
    """List problems of a library for macOS. Apple's loader rejects unsigned libraries on arm64."""
    parsed = lief.MachO.parse(library)
    if parsed is None or parsed.size != 1:
        return ["not a Mach-O file with one architecture"]
    (binary,) = parsed
    found = []
    if binary.header.cpu_type != MACHO_MACHINES[processor]:
        found.append(f"compiled for {binary.header.cpu_type.name}, expected {processor}")
    if not binary.has_build_version or binary.build_version.minos > MACOS_OLDEST:
        oldest = ".".join(map(str, binary.build_version.minos)) if binary.has_build_version else "an unknown version"
        found.append(f"needs macOS {oldest}, expected {'.'.join(map(str, MACOS_OLDEST))}")
    own = lief.MachO.LoadCommand.TYPE.ID_DYLIB
    needed = {str(other.name) for other in binary.libraries if other.command != own}
    found += [f"needs {name}, which is not a part of macOS" for name in sorted(needed - MACOS_LIBRARIES)]
    # Names of Python come from the interpreter, all others from the libraries above. A weak name, such as that of a class,
    # also needs a pointer to a definition in this library: the loader keeps it if no other library defines the name.
    own_pointers = {relocation.address for relocation in binary.relocations}
    weak = lief.MachO.DyldBindingInfo.CLASS.WEAK
    for binding in binary.bindings:
        name = str(binding.symbol.name).removeprefix("_")
        if binding.binding_class == weak:
            if binding.address not in own_pointers:
                found.append(f"{name}: weak, and not defined here")
            continue
        dynamic = binding.library_ordinal == DYNAMIC_LOOKUP
        if dynamic and not PYTHON_NAME.match(name):
            found.append(f"{name}: in no library")
        elif PYTHON_NAME.match(name) and not dynamic:
            found.append(f"{name}: bound to a library, expected the interpreter")
    if f"_{INIT}" not in {symbol.name for symbol in binary.exported_symbols}:
        found.append(f"does not export {INIT}")
    if binary.has_code_signature:
        start, size = binary.code_signature.data_offset, binary.code_signature.data_size
        if not signature_fits(library, library[start : start + size]):
            found.append("its signature does not fit its content")
    elif processor == "arm64":
        found.append("not signed")
    return found


def signature_fits(library: bytes, signature: bytes) -> bool:
    """Return whether the SHA-256 of every page equals the one in the code directory of an ad hoc signature."""
    _, _, count = struct.unpack_from(">III", signature)
    for i in range(count):
        kind, start = struct.unpack_from(">II", signature, 12 + 8 * i)
        if kind != 0:  # not the code directory
            continue
        offset, _, _, slots, limit = struct.unpack_from(">5I", signature, start + 16)
        size, algorithm, _, page = struct.unpack_from(">4B", signature, start + 36)
        if (size, algorithm) != (32, 2):  # SHA-256
            return False
        pages = [library[at : min(at + (1 << page), limit)] for at in range(0, limit, 1 << page)]
        hashes = b"".join(hashlib.sha256(content).digest() for content in pages)
        return len(pages) == slots and hashes == signature[start + offset : start + offset + size * slots]
    return False


def pe_problems(processor: str, library: bytes) -> list[str]:
    binary = lief.PE.parse(library)
    if binary is None:
        return ["not a PE file"]
    found = []
    if processor != "AMD64" or binary.header.machine != lief.PE.Header.MACHINE_TYPES.AMD64:
        found.append(f"compiled for {binary.header.machine.name}, expected {processor}")
    if not binary.header.has_characteristic(lief.PE.Header.CHARACTERISTICS.DLL):
        found.append("not a DLL")
    names = [str(imported.name) for imported in binary.imports]
    found += [f"needs {name}, which is not a part of Windows" for name in names if not WINDOWS_LIBRARIES.fullmatch(name)]
    if "python3.dll" not in names:
        found.append("does not use python3.dll, the stable ABI")
    if INIT not in {function.name for function in binary.exported_functions}:
        found.append(f"does not export {INIT}")
    return found
