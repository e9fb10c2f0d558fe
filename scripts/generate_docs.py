"""Write the generated pages of docs/reference/.

cli.md comes from the commands of `fqvit`, modules.md from module docstrings, c-api.md from the comments of fqvit.h.

`make docs` runs this before it builds the site; tests/project/test_docs.py checks that the committed pages are current.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from enum import EnumType
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from fqvit.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "fqvit"
REFERENCE = ROOT / "docs" / "reference"

# Every package, in the order in which data flows through them (docs/architecture.md).
PACKAGES = ("data", "models", "frontend", "quant", "lowering", "ir", "runtime", "export", "detect", "inference", "evaluate",
            "bench", "report", "web", "serve", "study", "integrations", "cli", "distributed", "system")  # fmt: skip
NATIVE = ("include", "capi", "ir", "core", "image", "ops", "kernels", "detect", "tools", "python")
C_HEADER = ROOT / "native" / "include" / "fqvit.h"


# ---- modules.md


def first_sentence(text: str) -> str:
    """Return the first sentence of a text on one line, without a list or formula that follows and without its final period.

    The next sentence starts with a capital letter, a parenthesis or the name of a C++ or Python file.
    """
    paragraph = " ".join(re.split(r"\n\n|\n\s*[-*] |\n {4}", text.strip())[0].split())
    found = re.match(r".+?\.(?= (?:[A-Z(]|[\w/]+\.(?:cpp|h|py)\b))", paragraph)
    return (found[0] if found else paragraph).rstrip(".:")


def purpose(path: Path) -> str:
    """Return the first sentence of a Python module's docstring or of a C or C++ file's leading comment.

    A file without a comment is the implementation of the header that it includes first. Returns "" if there is neither.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return first_sentence(ast.get_docstring(ast.parse(text)) or "")
    comment = re.match(r"(?:// ?[^\n]*\n)+", text)
    if comment:
        return first_sentence(re.sub(r"^// ?", "", comment[0], flags=re.MULTILINE))
    if text.startswith("/*"):
        words = first_sentence(re.sub(r"@file .*", "", comment_text(text[: text.index("*/")])))
        words = words.removeprefix(f"{path.stem.replace('_', '-')}: ")
        return words[:1].upper() + words[1:]
    header = re.match(r'#include "([\w/.]+)"', text)
    return f"Implementation of {header[1]}" if header else ""


def cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Format as code in a table cell. A | needs HTML: repository pages and MkDocs escape it differently inside backticks."""
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def table(title: str, paths: list[Path], about: str = "") -> list[str]:
    rows = [f"| `{path.relative_to(ROOT)}` | {cell(purpose(path))} |" for path in paths]
    return ["", f"## {title}", "", *([f"{cell(about)}.", ""] if about else []), "| file | purpose |", "|---|---|", *rows]


def modules() -> str:
    """Return the text of modules.md: one table per package, one row per module."""
    lines = [
        "# Modules",
        "",
        "The purpose of every module, from the first sentence of its docstring or leading comment.",
        "This page is generated: run `make docs` after a change.",
        "[Architecture](../architecture.md) explains how the packages depend on each other.",
        *table("fqvit", sorted(SOURCE.glob("*.py"))),
    ]
    for name in PACKAGES:
        files = [path for path in sorted((SOURCE / name).rglob("*.py")) if path.name != "__init__.py"]
        lines += table(f"fqvit.{name}", files, purpose(SOURCE / name / "__init__.py"))
    for name in NATIVE:
        files = [path for path in sorted((ROOT / "native" / name).rglob("*")) if path.suffix in (".h", ".cpp", ".c")]
        lines += table(f"native/{name}", files)
    return "\n".join(lines) + "\n"


# ---- cli.md


def options(function: Callable[..., Any]) -> tuple[list[str], list[str], list[str]]:
    """Return the words of the usage line, the table rows of the arguments and those of the options of one command."""
    hints = get_type_hints(function, include_extras=True)
    words, arguments, flags = [], [], []
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *extras = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        info = next(extra for extra in extras if isinstance(extra, (typer.models.ArgumentInfo, typer.models.OptionInfo)))
        metavar = info.metavar or value_name(kind)
        about, default = cell(info.help or ""), parameter.default
        if isinstance(info, typer.models.ArgumentInfo):
            words.append(metavar if default is inspect.Parameter.empty else f"[{metavar}]")
            arguments += [f"| {code(metavar)} | {about} |"] if about else []
            continue
        declared = [str(word) for word in (info.default, *(info.param_decls or ())) if str(word).startswith("-")]
        value = "" if kind is bool else f" {metavar}"
        if default is inspect.Parameter.empty:
            about += " Required."
        elif default not in (None, False):
            about += f" Default: `{getattr(default, 'value', default)}`."
        spelled = ", ".join(declared or ["--" + name.replace("_", "-")])
        flags.append(f"| {code(spelled + value)} | {about.strip()} |")
    return [*words, *(["[OPTIONS]"] if flags else [])], arguments, flags


def value_name(kind: Any) -> str:
    """Name the values of an option that has no metavar: the members of an enumeration, or the type."""
    kinds = [part for part in (get_args(kind) or (kind,)) if part is not type(None)]
    if isinstance(kinds[0], EnumType):
        members: list[Any] = list(kinds[0])
        return "|".join(str(member.value) for member in members)
    return str(getattr(kinds[0], "__name__", kinds[0])).upper()


def command_section(name: str, function: Callable[..., Any]) -> list[str]:
    words, arguments, flags = options(function)
    lines = ["", f"## {name}", "", cell(inspect.getdoc(function) or ""), "", f"    {' '.join([name, *words])}"]
    if arguments:
        lines += ["", "| argument | meaning |", "|---|---|", *arguments]
    if flags:
        lines += ["", "| option | meaning |", "|---|---|", *flags]
    return lines


def command_line() -> str:
    """Return the text of cli.md: one section per command."""
    commands = [(f"fqvit {entry.name}", entry.callback) for entry in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        commands += [(f"fqvit {group.name} {entry.name}", entry.callback) for entry in group.typer_instance.registered_commands]
    lines = [
        "# Command line",
        "",
        "Every command and option of `fqvit`. This page is generated from the source code: run `make docs` after a change.",
        "",
        "| exit code | meaning |",
        "|---|---|",
        "| 0 | done |",
        "| 1 | a bug in fqvit, with a traceback on stderr; please report it |",
        "| 2 | a mistake in the command, a file or an image; one line on stderr names it and the remedy |",
        "| 128 + signal | stopped: 130 by Ctrl-C, 143 by SIGTERM, 129 by a closed terminal, 141 by a closed pipe |",
    ]
    for name, function in commands:
        assert function is not None
        lines += command_section(name, function)
    return "\n".join(lines) + "\n"


# ---- c-api.md


def comment_text(comment: str) -> str:
    """Return the text of a C comment without its stars."""
    return re.sub(r"^[ \t]*/?\*+<?/?[ ]?", "", comment, flags=re.MULTILINE).strip()


def marked(text: str) -> str:
    """Format names of the interface as code."""
    return re.sub(r"(?<![\w`])((?:fqvit|FQVIT)_\w+(?:\(\))?(?!\w))", r"`\1`", text)


def described(comment: str) -> list[str]:
    """Turn a Doxygen comment into Markdown: paragraphs, @code blocks, and a table of @param lines."""
    lines: list[str] = []
    parameters: list[str] = []
    inside_code = False
    for line in comment_text(comment).splitlines():
        if line.startswith("@file"):
            continue
        if line in ("@code", "@endcode"):
            inside_code = line == "@code"
        elif inside_code:
            lines.append(f"    {line}".rstrip())
        elif found := re.match(r"@param (\w+) (.*)", line):
            parameters.append(f"| `{found[1]}` | {marked(cell(found[2]))} |")
        else:
            lines.append(marked(line))
    return [*lines, *(["", "| parameter | meaning |", "|---|---|", *parameters] if parameters else [])]


def member_rows(declaration: str) -> list[str]:
    """Return a table of the members of a struct or of the constants of an enumeration."""
    body = declaration[declaration.index("{") + 1 : declaration.rindex("}")]
    member = r"(\w+ = \d+),?" if declaration.startswith("typedef enum") else r"([^;/{}]+);"
    rows = []
    for found in re.finditer(member + r"\s*(?:/\*\*<((?:(?!\*/).)*)\*/)?", body, re.DOTALL):
        name, about = " ".join(found[1].split()), " ".join((found[2] or "").split())
        rows.append(f"| `{name}` | {marked(cell(about))} |")
    return ["| member | meaning |", "|---|---|", *rows]


def c_api() -> str:
    """Return the text of c-api.md: every documented declaration of fqvit.h, in its order."""
    text = C_HEADER.read_text(encoding="utf-8")
    comment = r"/\*\*(?!<)(?P<doc>(?:(?!\*/).)*)\*/\s*"
    kinds = r"#define [^\n]+|typedef (?:struct|enum) \w+ \{.*?\} \w+;|typedef struct \w+ \w+;|FQVIT_API [^;]+;"
    lines = [
        "# C API",
        "",
        "Every declaration of `fqvit.h`. This page is generated from its comments: run `make docs` after a change.",
        "[Use fqvit from C](../how-to/use-from-c.md) shows how to install and link the library.",
        "",
        *described(text[: text.index("*/")]),
    ]
    for found in re.finditer(f"{comment}(?P<declaration>{kinds})", text, re.DOTALL):
        declaration = re.sub(r"\s+", " ", found["declaration"].replace("FQVIT_API ", "")).strip()
        has_members = "{" in declaration
        match = re.match(r"#define (\w+)|typedef .* (\w+);$|.*?(\w+)\(", declaration)
        assert match is not None
        name = match[match.lastindex or 0]
        shown = [] if has_members else ["", f"    {declaration}"]
        lines += ["", f"## {name}", *shown, "", *described(found["doc"])]
        lines += ["", *member_rows(found["declaration"])] if has_members else []
    return "\n".join(lines) + "\n"


PAGES = {"modules.md": modules, "cli.md": command_line, "c-api.md": c_api}


def main() -> None:
    for name, page in PAGES.items():
        path, text = REFERENCE / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
