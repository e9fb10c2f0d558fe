"""scripts/check_dockerfile.py reads the Dockerfile and copies files as `docker build` does. Needs no container runtime here."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        import check_dockerfile

    return check_dockerfile


def test_the_files_that_the_dockerfile_copies_exist(script: ModuleType) -> None:
    copies = [rest.split() for word, rest in script.instructions((ROOT / "Dockerfile").read_text()) if word == "COPY"]
    names = [name for *names, _ in copies for name in names if not name.startswith(("--from", "/", "$"))]
    assert "pyproject.toml" in names and "src" in names
    assert all((ROOT / name).exists() for name in names)


def test_the_server_runs_as_a_user_without_privileges(script: ModuleType) -> None:
    steps = script.instructions((ROOT / "Dockerfile").read_text())
    after = [word for word, _ in steps[steps.index(("USER", "10001")) :]]
    assert after == ["USER", "EXPOSE", "HEALTHCHECK", "CMD"]


def test_stages_have_folders_variables_and_files_of_their_own(script: ModuleType, tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "etc").mkdir(parents=True)
    stages = script.Stages(base, tmp_path, {"MODEL": "LICENSE"})
    lines = ["ARG MODEL", "FROM image AS build", "WORKDIR /source", "COPY pyproject.toml LICENSE ./", "COPY scripts tools"]
    lines += [
        "# comment",
        "",
        "FROM image",
        "USER 10001",
        "COPY --from=build /source/tools /app/tools",
        "COPY ${MODEL} /app/models/",
    ]
    lines += ['HEALTHCHECK --interval=10s CMD ["true"]', 'CMD ["/bin/sh"]']
    for word, rest in script.instructions("\n".join(lines)):
        stages.step(word, rest)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"build/source/pyproject.toml", "build/source/LICENSE", "build/source/tools/soak.py"} < files
    assert {"final/app/tools/soak.py", "final/app/models/LICENSE"} < files and "final/source/LICENSE" not in files
    assert (stages.user, stages.health, stages.command) == ("10001", ["true"], ["/bin/sh"])


def test_a_missing_variable_and_an_unknown_instruction_are_named(script: ModuleType, tmp_path: Path) -> None:
    stages = script.Stages(tmp_path, tmp_path, {})
    with pytest.raises(SystemExit, match="MODEL: no value"):
        stages.step("ARG", "MODEL")
    with pytest.raises(SystemExit, match="VOLUME: not supported"):
        stages.step("VOLUME", "/data")
