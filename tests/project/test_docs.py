"""The documentation matches the code: every op, field and recipe is described, links and paths exist, and examples work.

See also: test_readme.py (runs the README's commands).
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import typer.main

from fqvit.cli.app import app
from fqvit.data.preprocess import Preprocess
from fqvit.detect.fixed.constants import DetectorConstants
from fqvit.detect.program import DetectorHeader
from fqvit.detect.settings import DetectSettings, read_settings
from fqvit.ir.kit import DTYPES
from fqvit.ir.ops import Term
from fqvit.ir.program import KINDS, AnyOp, CodeInput, Header, Move, MoveKind, Output, Program, Site
from fqvit.quant.recipe import RECIPES, Recipe, SiteRule, load_recipe
from fqvit.runtime.reference import Reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
OPS: dict[str, Any] = {str(op.__struct_config__.tag): op for op in get_args(AnyOp)}
FOLDERS = (
    r"(?:src|tests|docs|native|benchmarks|training|scripts|examples|models|quant|ir|runtime|evaluate|bench|export|study|report"
    r"|detect|data|lowering|cli|distributed|system|frontend|inference|integrations)"
)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def section(text: str, title: str) -> str:
    """Return the text from a heading to the next heading of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no section '{title}'"
    return found[1]


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of each table row, keyed by every word in backticks in the row's first cell."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|"):
            found.update(dict.fromkeys(re.findall(r"`([\w-]+)`", cells[0]), cells))
    return found


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def fields(kind: Any) -> dict[str, Any]:
    return {field.name: field for field in msgspec.structs.fields(kind)}


def plain_default(field: Any) -> str | None:
    """Return the default of a field as the documentation writes it; None if the field has no default."""
    if field.default is not msgspec.NODEFAULT:
        default = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    else:
        return None
    value = msgspec.to_builtins(default)
    return str(value) if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("tag", OPS)
def test_every_op_is_described_with_its_fields_parts_and_defaults(tag: str) -> None:
    text = section(page("docs/reference/format.md"), tag)
    own, _, term = text.partition("\nA term:\n")  # only the op add has this part
    own = re.sub(r"^\| part .*\n", "", own, flags=re.MULTILINE)  # a field and a part may have the same name
    for kind, table in ((OPS[tag], rows(own)), *([(Term, rows(term))] if term else [])):
        for name, field in fields(kind).items():
            if name == "y":
                continue
            assert name in table, f"{tag}: field {name} is missing"
            default = plain_default(field)
            if default is not None:
                assert table[name][2].strip("*`") == default, f"{tag}: default of {name}"
    for part in OPS[tag].parts:
        assert re.search(rf"^\| part `{part}` \|", text, re.MULTILINE), f"{tag}: part {part} is missing"


def test_every_described_op_exists() -> None:
    ops = page("docs/reference/format.md").split("\n## Ops\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^### (\w+)$", ops, re.MULTILINE)) == sorted(OPS)


@pytest.mark.parametrize("kind", [Header, Preprocess, CodeInput, Output, Move, Site], ids=lambda kind: str(kind.__name__))
def test_every_field_of_the_program_is_described(kind: Any) -> None:
    table = rows(section(page("docs/reference/format.md"), "Program"))
    assert [name for name in fields(kind) if name not in table] == []


def test_every_kind_of_output_and_move_is_described() -> None:
    table = rows(section(page("docs/reference/format.md"), "Program"))
    assert [kind for kind in (*KINDS, *get_args(MoveKind)) if kind not in table] == []


def test_documented_site_positions_match_the_struct() -> None:
    found = re.findall(r"^\| (\d) `(\w+)` \|", section(page("docs/reference/format.md"), "Program"), re.MULTILINE)
    assert found == [(str(i), name) for i, name in enumerate(fields(Site))]


def test_every_dtype_is_listed() -> None:
    text = page("docs/reference/format.md")
    assert [name for name in DTYPES if f"`{name}`" not in text or f"`{name.upper()}`" not in text] == []


@pytest.mark.parametrize("kind", [DetectorHeader, DetectorConstants], ids=lambda kind: str(kind.__name__))
def test_every_field_of_a_detector_is_described(kind: Any) -> None:
    table = rows(section(page("docs/reference/format.md"), "Detectors"))
    assert [name for name in fields(kind) if name not in table] == []


def test_every_setting_of_a_detector_is_described() -> None:
    table = rows(section(page("docs/reference/detection.md"), "Settings"))
    assert sorted(table) == sorted(fields(DetectSettings))


@pytest.mark.parametrize("name", ["docs/reference/detection.md", "docs/how-to/quantize-a-detector.md"])
def test_toml_examples_are_detector_settings(name: str, tmp_path: Path) -> None:
    examples = blocks(page(name), "toml")
    assert examples
    for example in examples:
        (tmp_path / "settings.toml").write_text(example, encoding="utf-8")
        assert read_settings(tmp_path / "settings.toml")


def test_every_field_of_a_recipe_is_described_with_its_default() -> None:
    table = rows(section(page("docs/reference/recipes.md"), "Fields"))
    assert sorted(table.keys() & fields(Recipe)) == sorted(fields(Recipe))
    for name, field in fields(Recipe).items():
        if name not in ("name", "sites"):
            assert table[name][2].strip("`") == plain_default(field), f"default of {name}"


def test_every_field_of_a_site_rule_is_described() -> None:
    table = rows(section(page("docs/reference/recipes.md"), "TOML files"))
    assert [name for name in fields(SiteRule) if name not in table] == []


def test_every_recipe_is_described_with_its_bits() -> None:
    table = rows(section(page("docs/reference/recipes.md"), "The recipes"))
    for name, recipe in RECIPES.items():
        assert table[name][1] == f"{recipe.weight_bits}/{recipe.activation_bits}/{recipe.attention_bits}", name


def test_every_role_is_described() -> None:
    pytest.importorskip("torch")
    from fqvit.models.layers import Role

    text = page("docs/reference/recipes.md")
    assert [role for role in get_args(Role) if f"`{role}`" not in text and role != "logits"] == []


@pytest.mark.parametrize("number", range(len(blocks(page("docs/reference/recipes.md"), "toml"))))
def test_toml_examples_are_recipes(number: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(blocks(page("docs/reference/recipes.md"), "toml")[number], encoding="utf-8")
    assert load_recipe(path).name == "mine"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_python_examples_compile_and_use_existing_names(path: Path) -> None:
    import fqvit

    for text in blocks(path.read_text(encoding="utf-8"), "python"):
        compile(text, named(path), "exec")
        names = set(re.findall(r"(?<![\"'])\bfqvit\.(\w+)", text))
        # A subpackage is an attribute only after it was imported.
        assert {name for name in names - set(dir(fqvit)) if find_spec(f"fqvit.{name}") is None} == set()


def options_by_command(command: Any, name: str = "fqvit") -> dict[str, set[str]]:
    """Return the options of every command: {"fqvit detect eval": {"--data", ...}, ...}."""
    found = {name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}}
    for child, below in getattr(command, "commands", {}).items():
        found |= options_by_command(below, f"{name} {child}")
    return found


OPTIONS = options_by_command(typer.main.get_command(app))


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_commands_use_options_that_exist(path: Path) -> None:
    names = "|".join(sorted(OPTIONS.keys() - {"fqvit"}, key=len, reverse=True))
    wrong = []
    for name, words in re.findall(rf"\b({names})\b([^\n`]*)", path.read_text(encoding="utf-8")):
        used = set(re.findall(r"(?<= )--?[a-z][\w-]*", words)) - {"--help"}
        wrong += [f"{name} {option}" for option in sorted(used - OPTIONS[name])]
    assert wrong == []


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_relative_links_resolve(path: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def anchors(path: Path) -> set[str]:
    """Return the headings of a page as link anchors."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_mentioned_paths_and_tests_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    paths = set(re.findall(rf"`({FOLDERS}/[\w./-]*)`", text))
    assert [p for p in sorted(paths) if not (ROOT / p).exists() and not (ROOT / "src" / "fqvit" / p).exists()] == []
    everything = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in everything] == []


def test_the_module_table_lists_every_module_with_its_purpose() -> None:
    table = page("docs/reference/modules.md")
    files = [path for path in sorted((ROOT / "src" / "fqvit").rglob("*.py")) if path.name != "__init__.py"]
    rows_found = dict(re.findall(r"^\| `(src/fqvit/[\w/.]+)` \| (.*) \|$", table, re.MULTILINE))
    assert [named(path) for path in files if not rows_found.get(named(path), "").strip()] == []
    assert [name for name in rows_found if not (ROOT / name).exists()] == []


def test_the_architecture_is_short_and_lists_every_package() -> None:
    text = page("docs/architecture.md")
    packages = sorted(path.parent.name for path in (ROOT / "src" / "fqvit").glob("*/__init__.py"))
    assert len(text.splitlines()) <= 150
    assert [name for name in packages if f"| `{name}/` |" not in text] == []
    layers = re.findall(r"^    (\w+)$", section(text, "Dependencies between packages"), re.MULTILINE)
    assert sorted(layers) == sorted([*packages, "errors"])
    contract = tomllib.loads(page("pyproject.toml"))["tool"]["importlinter"]["contracts"][0]
    assert layers == contract["layers"]  # the layers that `make lint` checks


def test_example_names_of_unlisted_models_are_accepted() -> None:
    from fqvit.models.zoo import BY_NAME, lookup

    names = re.findall(r"`(\w+_\w+_\d+[\w.]*)`", section(page("docs/reference/models.md"), "Model names"))
    assert len(names) == 4 and all(lookup(name) is not None and name not in BY_NAME for name in names)


def test_example_names_of_refused_checkpoints_have_a_reason() -> None:
    from fqvit.models.architectures import why_not

    names = re.findall(r"`(\w+_\w+[\w.]*)`", section(page("docs/reference/models.md"), "Coverage"))
    assert len(names) >= 10 and [name for name in names if why_not(name) is None] == []


def test_no_placeholder_is_left() -> None:
    left = {named(path): re.findall(r"@@\w+@@", path.read_text(encoding="utf-8")) for path in PAGES}
    assert {name: found for name, found in left.items() if found} == {}


def test_the_example_on_the_format_page_loads_and_runs() -> None:
    """Hash the example as the page specifies, then load, verify and run it."""
    example = section(page("docs/reference/format.md"), "Example")
    wrapped, constants_text, buffers_text = blocks(example, "json")
    text = wrapped.replace("\n", "")
    constants = {name: np.array(values, DTYPES[dtype]) for name, (dtype, values) in json.loads(constants_text).items()}
    dtypes = {name: dtype for name, (dtype, _) in json.loads(constants_text).items()}

    digest = hashlib.sha256(text.encode())
    for name in sorted(constants):
        shape = ",".join(str(size) for size in constants[name].shape)
        digest.update(f"\n{name} {dtypes[name]} {shape}\n".encode())
        digest.update(constants[name].astype(constants[name].dtype.newbyteorder("<")).tobytes())
    found = re.search(r"^Fingerprint: `([0-9a-f]{64})`", example, re.MULTILINE)
    assert found is not None and digest.hexdigest() == found[1]

    program = Program(msgspec.json.decode(text, type=Header), constants)
    assert program.fingerprint() == found[1]
    buffers: dict[str, Any] = {}
    images = np.array([[0, 255], [100, 50]], np.uint8).reshape(1, 2, 2, 1)
    Reference(program).run(images, lambda name, codes: buffers.update({name: codes[0].tolist()}))
    assert buffers == json.loads(buffers_text)
    assert program.classes is not None and program.classes[int(np.argmax(buffers["head"]))] == "dog"
