"""Test the package: the wheel holds every file, declares what it imports, and works where there is no clone."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

from tests.conftest import REPOSITORY
from tests.support.runs import environment, finish, metrics, start

DEVELOPMENT = ("docs", "fuzz", "audit", "test")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What a declared package always brings along, imported directly: triton comes with torch for GPUs.
BROUGHT = {"pydantic-core": "pydantic", "starlette": "fastapi", "triton": "torch"}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_every_import_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    users = [extras[name] for name in extras if name not in DEVELOPMENT]
    declared = names(PROJECT["dependencies"]).union(*map(names, users))
    owners = packages_distributions()
    for path in sorted((REPOSITORY / "src" / "muralist").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            absolute = isinstance(node, ast.ImportFrom) and not node.level
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if absolute and node.module else []
            for top in {module.partition(".")[0] for module in modules} - {"muralist", *sys.stdlib_module_names}:
                owner = canonicalize_name(owners.get(top, [top])[0])
                assert BROUGHT.get(owner, owner) in declared, f"{path}: {top} of {owner} is not a dependency"


def test_the_table_of_extras_is_complete() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    table = readme.split("| extra | adds |\n")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)))) == set(
        PROJECT["optional-dependencies"]
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, and that from the files of the repository."""
    root = tmp_path_factory.mktemp("build")
    shutil.copytree(
        REPOSITORY / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"), symlinks=True
    )
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, root)
    # Without isolation: setuptools is installed with its pinned version, and nothing is downloaded.
    finish(start("python", "-m", "build", "--no-isolation", cwd=root))
    (found,) = (root / "dist").glob("*.whl")
    files = {path.relative_to(root / "src").as_posix() for path in (root / "src").rglob("muralist/**/*")
             if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip
    packed = {name for name in zipfile.ZipFile(found).namelist() if ".dist-info/" not in name}
    assert packed == files and "muralist/configs/base_config.yaml" in packed
    return found


def required(wheel: Path) -> dict[str, Distribution]:
    """Return the installed packages that the wheel declares, and those that they declare, without any extra."""
    metadata = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    waiting = [
        (text, "") for text in re.findall(r"^Requires-Dist: (.*)", zipfile.ZipFile(wheel).read(metadata).decode(), re.M)
    ]
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if (text, extra) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        seen.add((text, extra))
        package = found[canonicalize_name(requirement.name)] = distribution(requirement.name)
        waiting += [(below, wanted) for below in package.requires or [] for wanted in ("", *requirement.extras)]
    return found


def link_packages(packages: dict[str, Distribution], site: Path) -> None:
    """Put installed packages into another environment, as links: torch alone would take minutes to install."""
    for package in packages.values():
        for top in {Path(file).parts[0] for file in package.files or []} - {"..", "__pycache__"}:
            target = Path(str(package.locate_file(top)))
            if target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)


@pytest.mark.slow
def test_the_walk_with_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Run docs/installing.md where only the wheel and its declared dependencies are: no clone, no extra, no registry."""
    shutil.copy(wheel, tmp_path)
    page = (REPOSITORY / "docs" / "installing.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(bash|python)\n(.*?)```", page, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["bash", "bash", "python", "bash", "bash", "bash", "python", "python"]
    # None of the caller's variables: PYTHONPATH or a virtual environment would lead to the clone.
    kept = {name: value for name, value in environment().items() if name in ("HOME", "LANG", "OMP_NUM_THREADS", "CI")}
    plain = {
        **kept,
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PATH": "/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_CONSTRAINT": str(REPOSITORY / "constraints.txt"),
    }

    def run(script: str) -> str:
        activate = (
            "source env/bin/activate\n"
            if (tmp_path / "env").exists()
            else f'python3() {{ "{sys.executable}" "$@"; }}\n'
        )
        words = ["bash", "-euc", activate + script]
        done = subprocess.run(words, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    said = [run(blocks[0][1])]
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    link_packages(required(wheel), site)
    for number, (kind, code) in enumerate(blocks[1:]):
        if kind == "python":
            (tmp_path / f"block{number}.py").write_text(code)
        said.append(run(code if kind == "bash" else f"python block{number}.py"))
    assert PROJECT["version"] in said[1]
    where = run('pip check\npython -c "import muralist; print(muralist.__file__)"')
    assert "No broken requirements" in where and str(site / "muralist" / "__init__.py") in where
    assert f"using the one of the package, {site / 'muralist' / 'configs' / 'debug_config.yaml'}" in said[3]
    first, second = (tmp_path / "results" / name for name in ("first", "second"))
    assert [line["step"] for run_dir in (first, second) for line in metrics(run_dir)] == list(range(1, 11))
    assert metrics(second)[-1]["train/learning_rate"] == 5e-4
    names = ("highway.png", "diffusers.png", next((tmp_path / "images").glob("*seed42.png")))
    loaded, by_diffusers, generated = (Image.open(tmp_path / name) for name in names)
    assert loaded.size == (32, 32) and loaded.tobytes() == by_diffusers.tobytes() == generated.tobytes()
