"""Imports point one way; torch is imported only where it is needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "recoup"
# A file may import only from stages above its own, or from its own.
ORDER = (
    "errors",
    "thresholds",
    "units",
    "progress",
    "ir",
    "_torch",
    "_pytree",
    "_reachable",
    "_storages",
    "_interrupts",
    "_collector",
    "_allocation",
    "cost",
    "solver",
    "runtime",
    "recurrent",
    "capture",
    "evidence",
    "analysis",
    "report",
    "jax",
    "planner",
    "compiled",
    "api",
    "integrations",
    "targets",
    "selective",
    "export",
    "cli",
    "__main__",
)
WITHOUT_TORCH = ("errors", "thresholds", "units", "progress", "ir", "solver", "analysis", "report", "export", "jax")


def _stage(path: Path) -> str:
    part = path.relative_to(ROOT).parts[0]
    return part.removesuffix(".py")


def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            if node.module == "recoup":
                found += [f"recoup.{alias.name}" for alias in node.names]
    return found


FILES = [p for p in sorted(ROOT.rglob("*.py")) if p.name != "__init__.py" or p.parent != ROOT]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    stage = _stage(path)
    assert stage in ORDER, f"{stage} has no place in the order"
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "recoup" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= ORDER.index(stage), f"{stage} imports {name}"


def _file_of(name: str) -> str | None:
    """The module file that an imported name lives in, dotted; None outside of recoup."""
    parts = name.split(".")
    while parts and parts[0] == "recoup":
        path = ROOT.joinpath(*parts[1:])
        if len(parts) > 1 and path.with_suffix(".py").exists():
            return ".".join(parts)
        parts.pop()
    return None


def _files_imported_at_the_top(path: Path) -> set[str]:
    """Files of recoup that a file imports when it is itself imported (not inside functions, not for types only)."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {file for file in map(_file_of, names) if file is not None}
    return found


def test_folding_has_one_entrance() -> None:
    room = ROOT / "capture" / "folding"
    for path in [*ROOT.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]:
        if room not in path.parents:
            for name in _imports(path):
                assert not name.startswith("recoup.capture.folding."), f"{path.name} imports {name}"


def test_no_cycles_among_files() -> None:
    files = {".".join(("recoup", *p.relative_to(ROOT).with_suffix("").parts)): p for p in FILES}
    left = {name: _files_imported_at_the_top(path) - {name} for name, path in files.items()}
    while left:
        free = [name for name, imported in left.items() if not imported & left.keys()]
        assert free, f"these import each other: {sorted(left)}"
        for name in free:
            del left[name]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_only_where_it_is_needed(path: Path) -> None:
    if _stage(path) in WITHOUT_TORCH or "schedules" in path.parts:
        assert not any(name.split(".")[0] == "torch" for name in _imports(path))


MOST_LINES = 400
LONGER = {
    "_torch.py": "every private torch API: one file to read when torch changes",
}


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name for name, lines in lengths.items() if lines > MOST_LINES} == set(LONGER)


def test_private_torch_is_in_one_file() -> None:
    for path in FILES:
        if path.name == "_torch.py":
            continue
        for name in _imports(path):
            assert not name.startswith("torch._"), f"{path.name} imports {name}"
        assert "torch._C" not in path.read_text(), f"{path.name} reaches into torch._C"


@pytest.mark.parametrize("command", ["import recoup", "from recoup import Plan, errors, InfeasibleBudget"])
def test_importing_recoup_does_not_import_torch(command: str) -> None:
    code = f"{command}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nsys.argv = ['recoup', '--help']\nfrom recoup.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fit" in done.stdout


def test_public_names() -> None:
    import recoup

    assert recoup.__all__ == sorted(recoup.__all__)
    for name in recoup.__all__:
        assert getattr(recoup, name) is not None
    import recoup.evidence.verify

    assert callable(recoup.verify)


def test_the_architecture_page_names_every_room_in_order() -> None:
    page = (ROOT.parent.parent / "docs" / "architecture.md").read_text()
    listing = page.split("## The rooms", 1)[1].split("```")[1]
    listed = [word.strip("/").removesuffix(".py") for word in re.findall(r"^\S+(?: \w+\.py)*", listing, re.M)]
    rooms = [name.removesuffix(".py") for entry in listed for name in entry.split()]
    assert rooms == [room for room in ORDER if room != "__main__"]
    inside = set(re.findall(r"^  (\w+)/", listing, re.M))
    for path in ROOT.iterdir():
        if path.suffix == ".py" or (path / "__init__.py").exists():
            assert path.stem in {*ORDER, "__init__"}, f"{path.name} is no room"
    for name in inside:
        assert any((ROOT / room / name / "__init__.py").exists() for room in ORDER), f"{name}/ is in no room"


def test_files_that_pages_and_docstrings_name_exist() -> None:
    here = ROOT.parent.parent
    for page in [here / "README.md", *sorted((here / "docs").glob("*.md")), *FILES]:
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            assert (here / name).exists() or any(ROOT.rglob(name)), f"{page.name} names {name}"


def test_each_stop_of_a_walk_is_where_the_page_says() -> None:
    here = ROOT.parent.parent
    page = (here / "docs" / "architecture.md").read_text()
    walks = re.split(r"^\*\*.+?\*\*", page.split("## Walks", 1)[1].split("## Decisions", 1)[0], flags=re.M)[1:]
    assert len(walks) >= 7
    for walk in walks:
        stops = re.findall(r"^\d\. (.+(?:\n   .+)*)", walk, re.M)
        assert 3 <= len(stops) <= 5
        for path, name in re.findall(r"`([\w/]+\.py)`, `([\w.]+)`", "\n".join(stops)):
            tree = ast.parse((ROOT / path).read_text())
            defined = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
            for part in name.split("."):
                assert part in defined, f"{path} does not define {name}"
