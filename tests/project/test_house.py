"""Rules of the repository: light imports, short files, nothing unpickled, no paths of a particular machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "PIL", "rich.progress", "jinja2", "onnx", "onnxruntime")


def tracked_files() -> list[Path]:
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")
    return [ROOT / name for name in listing.decode().split("\0") if name and (ROOT / name).is_file()]


def loaded_by(code: str) -> set[str]:
    """Run the code in a fresh interpreter and return the heavy modules that it has imported."""
    code += f"\nimport sys; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split())


def test_importing_fqvit_loads_nothing_heavy() -> None:
    assert loaded_by("import fqvit") == set()


def test_help_loads_nothing_heavy() -> None:
    code = "import sys\nfrom fqvit.cli.app import main\nsys.argv = ['fqvit', '--help']\ntry: main()\nexcept SystemExit: pass"
    assert loaded_by(code) == set()


def test_modules_for_running_a_program_need_no_torch() -> None:
    assert "torch" not in loaded_by(
        "import fqvit.data.preprocess, fqvit.data.images, fqvit.system.progress, fqvit.system.files"
    )
    assert "torch" not in loaded_by("import fqvit.detect.float.pipeline, fqvit.detect.coco, fqvit.detect.fixed.detector")
    assert "torch" not in loaded_by(
        "import fqvit.detect.file, fqvit.cli.commands.detect_eval, fqvit.cli.commands.detect_predict"
    )
    assert "torch" not in loaded_by("import fqvit.cli.commands.detect_draw, fqvit.cli.commands.inspect_detector")
    assert "torch" not in loaded_by(
        "import fqvit.report.predictions, fqvit.report.plots, fqvit.report.maps, fqvit.cli.commands.report"
    )


def test_running_a_program_file_does_not_import_python_parsers() -> None:
    # The parsers and the Python classes of ops take 11 MB, a fifth of the memory of a process that runs DeiT-Small.
    path = ROOT / "tests" / "golden" / "tiny_v1.fqvit"
    code = f"import fqvit, numpy as np\nengine = fqvit.Engine({str(path)!r})\n"
    code += "engine.classify(np.zeros((1, *engine.input_shape), np.uint8))\n"
    code += "import sys; assert not {'msgspec', 'safetensors', 'PIL', 'fqvit.ir.program'} & set(sys.modules), sys.modules"
    assert loaded_by(code) == set()


def test_the_package_is_typed_and_runs_as_a_module() -> None:
    assert (ROOT / "src" / "fqvit" / "py.typed").exists()
    result = subprocess.run([sys.executable, "-m", "fqvit", "--help"], capture_output=True, text=True, check=True)
    assert "quantize" in result.stdout


def test_no_source_file_is_longer_than_400_lines() -> None:
    code = [path for path in tracked_files() if path.suffix in (".py", ".pyi", ".cpp", ".h")]
    assert code
    assert [(path.name, n) for path in code if (n := len(path.read_text().splitlines())) > 400] == []


def test_only_the_cli_package_imports_its_commands() -> None:
    package = ROOT / "src" / "fqvit"
    using = {path.relative_to(package).parts[0] for path in package.rglob("*.py") if "fqvit.cli.commands" in path.read_text()}
    assert using == {"cli"}


def test_nothing_is_unpickled() -> None:
    words = re.compile(r"pickle\.loads?\(|Unpickler|weights_only=False|allow_pickle=True")
    code = (path for path in tracked_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests")
    assert [path.name for path in code if words.search(path.read_text())] == []


def test_no_tracked_file_contains_machine_paths() -> None:
    # Each string is split, so that this file passes its own test.
    words = ["/" + "tmp/w", "/" + "work/", "/home" + "/", "/opt" + "/", "pypi" + ".org", "files." + "pythonhosted"]
    pattern = re.compile("|".join(map(re.escape, words)))
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {hit.group()}" for hit in pattern.finditer(text)]
    assert found == []
