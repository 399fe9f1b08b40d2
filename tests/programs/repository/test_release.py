"""Releases: version, public names, types, extras and reproducible packages."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import otel_limits
import otel_limits.testing
from tests.paths import ROOT
from tests.readme import README
from tests.unit.repository.test_pages import LINK, links

if TYPE_CHECKING:
    from collections.abc import Mapping


PROJECT: Final = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
CHANGELOG: Final = (ROOT / ".github/CHANGELOG.md").read_text(encoding="utf-8")
RELEASES: Final = re.findall(r"^## \[(\d[\d.]*)\]", CHANGELOG, re.MULTILINE)
SOURCES: Final = (
    "otel_limits",
    "dashboards",
    "tests",
    "README.md",
    "LICENSE",
    "pyproject.toml",
    ".gitignore",
    ".github",
    ".ci",
    ".pre-commit-config.yaml",
)


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a Python program and return its output."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(root: Path, place: Path) -> Mapping[str, str]:
    """Build both packages and return their hashes."""
    run("-m", "hatchling", "build", "-d", str(place), cwd=root)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in place.iterdir()}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the source distribution."""
    place = tmp_path_factory.mktemp("packages")
    build(ROOT, place)
    return place


# --- version and names ----------------------------------------------------------------------------


def test_version_matches_latest_changelog_entry() -> None:
    """Users look up the version they installed."""
    assert re.findall(r'^version = "(.*)"', PROJECT, re.MULTILINE) == RELEASES[:1]


@pytest.mark.parametrize("release", RELEASES)
def test_public_names_of_each_release_still_exist(release: str) -> None:
    """Removing a name breaks programs, so it takes an edit of a list as well."""
    names = (ROOT / f"tests/public_names/{release}.txt").read_text(encoding="utf-8").split()
    now = {*otel_limits.__all__, *(f"testing.{name}" for name in otel_limits.testing.__all__)}
    assert len(names) > 50
    assert set(names) - now == set()
    assert all(hasattr(otel_limits, name) for name in names if "." not in name)


# --- packages -------------------------------------------------------------------------------------


def test_all_extra_contains_every_runtime_extra() -> None:
    """The other extras are for developing otel-limits."""
    (listed,) = re.findall(r'^all = \["otel-limits\[(.*)\]"\]$', PROJECT, re.MULTILINE)
    section = PROJECT.split("[project.optional-dependencies]")[1].split("[project.scripts]")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE))
    assert set(listed.split(",")) == extras - {"all", "ci", "dashboards", "test"}


def test_builds_are_reproducible(packages: Path, tmp_path: Path) -> None:
    """The directory, the time and file times do not matter."""
    root = tmp_path / "elsewhere"
    root.mkdir()
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "node_modules", ".*_cache")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, copy_function=shutil.copy, ignore=ignored)
        else:
            shutil.copy(ROOT / name, root / name)
    first = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in packages.iterdir()
    }
    assert len(first) == 2
    assert build(root, tmp_path / "again") == first


def test_source_distribution_contains_all_linked_files(packages: Path) -> None:
    """The README is complete without a checkout."""
    (source,) = packages.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    linked = {str(file.relative_to(ROOT)) for file, _ in links(README)} - {README.name}
    assert len(linked) > 15
    assert linked - names == set()


def test_wheel_contains_all_files_with_facts(packages: Path) -> None:
    """They are read during the first model call."""
    (wheel,) = packages.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "otel_limits").rglob("*.yaml")}
    assert len(files) > 25
    assert files - names == set()


def test_package_description_has_no_relative_links(packages: Path) -> None:
    """A package index shows no files, so the build replaces links and images with their text."""
    (wheel,) = packages.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        description = archive.read(name).decode().partition("\n\n")[2]
    assert [target for target in LINK.findall(description) if "://" not in target] == []
    assert len(description) > 0.7 * len(README.read_text(encoding="utf-8"))


def test_packages_pass_twine_check(packages: Path) -> None:
    """A package index rejects incomplete metadata and a description it cannot render."""
    output = run("-m", "twine", "check", "--strict", *map(str, packages.iterdir()))
    assert output.count("PASSED") == 2


def test_wheel_without_extras_halts_an_agent(packages: Path, tmp_path: Path) -> None:
    """Optional dependencies stay optional."""
    (wheel,) = packages.glob("*.whl")
    place = str(tmp_path / "installed")
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", place, str(wheel))
    extras = "genai_prices", "matplotlib", "psycopg", "redis", "grpc"
    program = f"""
import sys
sys.path.insert(0, {place!r})
sys.modules.update(dict.fromkeys({extras!r}))
sys.path.insert(1, {str(ROOT / "tests/api")!r})
import limiting, otel_limits
print(otel_limits.__file__)
print(limiting.describe(limiting.make()))
"""
    origin, text = run("-I", "-c", program, cwd=tmp_path).splitlines()
    assert origin == f"{place}/otel_limits/__init__.py"
    assert text.startswith("max_turns at max_turns, limiting.py:")
