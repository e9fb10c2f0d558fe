"""Write small libraries in the formats of Linux, macOS and Windows: headers, imported and exported names, and no code."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

SYSTEM = "/usr/lib/libSystem.B.dylib"
CPU_TYPES = {"x86_64": 0x01000007, "arm64": 0x0100000C}
PAGE = 0x1000


def elf(machine: int, exports: tuple[str, ...] = ("PyInit__native",)) -> bytes:
    """Return a 64-bit ELF library: header, one loaded segment, dynamic section, symbols and names. machine: 62 or 183"""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in exports)
    symbols, at = bytes(24), 1
    for name in exports:
        symbols += struct.pack("<IBBHQQ", at, 0x12, 0, 1, 0x40, 8)  # a global function in section 1
        at += len(name) + 1
    start = 64 + 2 * 56
    hashes = struct.pack("<3I", 1, 1 + len(exports), 0) + struct.pack(f"<{1 + len(exports)}I", *[0] * (1 + len(exports)))
    parts = {
        "symbols": symbols,
        "names": names.ljust(-(-len(names) // 8) * 8, b"\0"),
        "hashes": hashes.ljust(-(-len(hashes) // 8) * 8, b"\0"),
    }
    where = {}
    for name, content in parts.items():
        where[name] = start
        start += len(content)
    # DT_HASH, DT_SYMTAB, DT_SYMENT, DT_STRTAB, DT_STRSZ, DT_NULL
    entries = ((4, where["hashes"]), (6, where["symbols"]), (11, 24), (5, where["names"]), (10, len(names)), (0, 0))
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    size = start + len(dynamic)
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 0x1000)
    table = struct.pack("<IIQQQQQQ", 2, 6, start, start, start, len(dynamic), len(dynamic), 8)
    return header + load + table + b"".join(parts.values()) + dynamic


@dataclass
class MachO:
    """imports: pairs of a name and its library (1: the first one, -2: looked up in everything that is loaded)
    weak: names that may be replaced by those of another library, without a definition in this one
    """

    processor: str = "arm64"
    oldest: tuple[int, int] = (11, 0)
    libraries: tuple[str, ...] = (SYSTEM,)
    imports: tuple[tuple[str, int], ...] = (("_malloc", 1), ("_PyErr_Clear", -2), ("__Py_Dealloc", -2))
    exports: tuple[str, ...] = ("_PyInit__native",)
    weak: tuple[str, ...] = ()
    signed: bool = True
    commands: list[bytes] = field(default_factory=list)

    def command(self, kind: int, content: bytes) -> None:
        content = content.ljust(-(-len(content) // 8) * 8, b"\0")
        self.commands.append(struct.pack("<II", kind, 8 + len(content)) + content)

    def bytes(self) -> bytes:
        """Return the file: one page of headers, then the tables and the signature."""
        opcodes = b""
        for i, (name, library) in enumerate(self.imports):
            # library, name, type, address in segment 0, bind
            opcodes += bytes([0x10 | library if library > 0 else 0x30 | library & 0xF])
            opcodes += b"\x40" + name.encode() + b"\0" + b"\x51" + bytes([0x70, 0x80 | 8 * i, 0x10]) + b"\x90"
        opcodes = (opcodes + b"\0").ljust(-(-(len(opcodes) + 1) // 8) * 8, b"\0")
        weak = b"".join(b"\x40" + name.encode() + b"\0\x51\x70\x00\x90" for name in self.weak)
        weak = (weak + b"\0").ljust(-(-(len(weak) + 1) // 8) * 8, b"\0")
        # The tree of exported names: a root with one leaf per name, which has 2 bytes: flags and address.
        root = 2 + sum(len(name) + 2 for name in self.exports)
        tree = bytes([0, len(self.exports)])
        tree += b"".join(name.encode() + bytes([0, root + 4 * i]) for i, name in enumerate(self.exports))
        tree += b"\x02\0\x10\0" * len(self.exports)
        names, symbols = b"\0", b""
        for name, kind in [(name, 0x0F) for name in self.exports] + [(name, 0x01) for name, _ in self.imports]:
            symbols += struct.pack("<IBBHQ", len(names), kind, 1 if kind == 0x0F else 0, 0, PAGE if kind == 0x0F else 0)
            names += name.encode() + b"\0"
        content = opcodes + symbols + names + tree + weak
        end = -(-(PAGE + len(content)) // 16) * 16
        count = len(self.exports) + len(self.imports)
        signed = 20 + 44 + 32 * -(-end // PAGE) if self.signed else 0
        for name in ("__DATA", "__LINKEDIT"):
            at = (0, 2 * PAGE, 0, PAGE) if name == "__DATA" else (2 * PAGE, 2 * PAGE, PAGE, end - PAGE + signed)
            self.command(0x19, name.encode().ljust(16, b"\0") + struct.pack("<QQQQiiII", *at, 3, 3, 0, 0))
        after = PAGE + len(opcodes + symbols + names)
        tables = (0, 0, PAGE, len(opcodes), after + len(tree), len(weak), 0, 0, after, len(tree))
        self.command(0x80000022, struct.pack("<10I", *tables))  # LC_DYLD_INFO_ONLY
        self.command(0x2, struct.pack("<4I", PAGE + len(opcodes), count, PAGE + len(opcodes + symbols), len(names)))
        table = (0, 0, 0, len(self.exports), len(self.exports), len(self.imports))
        self.command(0xB, struct.pack("<18I", *table, *[0] * 12))  # LC_DYSYMTAB
        self.command(0x32, struct.pack("<4I", 1, self.oldest[0] << 16 | self.oldest[1] << 8, 0, 0))  # LC_BUILD_VERSION
        self.command(0xD, struct.pack("<4I", 24, 0, 0, 0) + b"@rpath/_native.so\0")  # LC_ID_DYLIB
        for library in self.libraries:
            self.command(0xC, struct.pack("<4I", 24, 0, 0, 0) + library.encode() + b"\0")
        if self.signed:
            self.command(0x1D, struct.pack("<II", end, signed))
        commands = b"".join(self.commands)
        header = struct.pack("<8I", 0xFEEDFACF, CPU_TYPES[self.processor], 0, 6, len(self.commands), len(commands), 0x85, 0)
        file = ((header + commands).ljust(PAGE, b"\0") + content).ljust(end, b"\0")
        return file + (signature(file) if self.signed else b"")


def signature(file: bytes) -> bytes:
    """Return an ad hoc signature: a code directory with the SHA-256 of every page."""
    hashes = [hashlib.sha256(file[at : at + PAGE]).digest() for at in range(0, len(file), PAGE)]
    size = 44 + 32 * len(hashes)
    directory = struct.pack(">9I4BI", 0xFADE0C02, size, 0x20001, 2, 44, 0, 0, len(hashes), len(file), 32, 2, 0, 12, 0)
    return struct.pack(">5I", 0xFADE0CC0, 20 + size, 1, 0, 20) + directory + b"".join(hashes)


def pe(
    imports: dict[str, tuple[str, ...]], exports: tuple[str, ...] = ("PyInit__native",), machine: int = 0x8664, dll: bool = True
) -> bytes:
    """Return a 64-bit PE file with one section, which contains the tables of imported and exported names."""
    base, raw = 0x1000, 0x400
    data = bytearray(20 * (len(imports) + 1))

    def add(content: bytes) -> int:
        """Append to the section and return the address."""
        data.extend(content.ljust(-(-len(content) // 8) * 8, b"\0"))
        return base + len(data) - -(-len(content) // 8) * 8

    for i, (library, names) in enumerate(imports.items()):
        entries = b"".join(struct.pack("<Q", add(b"\0\0" + name.encode() + b"\0")) for name in names) + bytes(8)
        struct.pack_into("<5I", data, 20 * i, add(entries), 0, 0, add(library.encode() + b"\0"), add(entries))
    functions = add(struct.pack(f"<{len(exports)}I", *[base] * len(exports)))
    pointers = add(b"".join(struct.pack("<I", add(name.encode() + b"\0")) for name in exports))
    ordinals = add(struct.pack(f"<{len(exports)}H", *range(len(exports))))
    own = add(b"_native.pyd\0")
    table = add(struct.pack("<IIHHIIIIIII", 0, 0, 0, 0, own, 1, len(exports), len(exports), functions, pointers, ordinals))
    size = len(data)
    file = b"MZ".ljust(60, b"\0") + struct.pack("<I", 64) + b"PE\0\0"
    file += struct.pack("<HHIIIHH", machine, 1, 0, 0, 0, 240, 0x2022 if dll else 0x22)
    file += struct.pack("<HBBIIIII", 0x20B, 14, 0, 0, size, 0, 0, base)
    file += struct.pack(
        "<QII6HIIIIHH4QII",
        0x180000000,
        0x1000,
        0x200,
        6,
        0,
        0,
        0,
        6,
        0,
        0,
        0x3000,
        raw,
        0,
        2,
        0x160,
        *[0x100000, 0x1000] * 2,
        0,
        16,
    )
    file += struct.pack("<4I", table, 40, base, 20 * (len(imports) + 1)) + bytes(8 * 14)
    file += b".rdata\0\0" + struct.pack("<6IHHI", size, base, size, raw, 0, 0, 0, 0, 0x40000040)
    return file.ljust(raw, b"\0") + bytes(data)
