"""The four floors: an import never points up, and nothing else lies at the top."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.guards import GUARDS

ROOT = Path(__file__).parent.parent
FLOORS = ("firmware_sim", "monitor", "inspector", "analysis")
TOP = {*FLOORS, "tests", "pyproject.toml", "README.md", "constraints.txt", "LICENSE"}


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for floor in FLOORS for path in (ROOT / floor).rglob("*.py")
}


@dataclass(frozen=True)
class Read:
    """What these tests ask of a module's syntax tree, which is made once.

    Attributes:
        tops: first names of all absolute imports, and of modules that a string names.
        names: full names of everything that it imports, of a package what is taken from it; modules named by a string.
        spelt: each attribute and each ``from`` import, as it is written.
        called: each function that is called, as it is written.
    """

    tops: frozenset[str]
    names: tuple[str, ...]
    spelt: frozenset[str]
    called: frozenset[str]


@cache
def read(path: Path) -> Read:
    tops, names, spelt, called = set(), [], set(), set()
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES:
            names.append(node.value)
            tops.add(node.value.split(".")[0])
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
            tops |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            spelt.add(ast.unparse(node))
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            names += [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
            if node.level == 0 and node.module:
                tops.add(node.module.split(".")[0])
        elif isinstance(node, ast.Attribute):
            spelt.add(ast.unparse(node))
        elif isinstance(node, ast.Call):
            called.add(ast.unparse(node.func))
    return Read(frozenset(tops), tuple(names), frozenset(spelt), frozenset(called))


@pytest.mark.parametrize("number", range(len(FLOORS)), ids=FLOORS)
def test_imports_never_point_up(number):
    above = set(FLOORS[number + 1 :]) | {"tests"}
    files = sorted((ROOT / FLOORS[number]).rglob("*.py"))
    assert files
    for path in files:
        assert not read(path).tops & above, path


def test_no_module_imports_itself_by_way_of_others():
    """Imports for types alone count, too; a package's face, which hands names on, does not."""
    graph = {}
    for name in (each for each in MODULES if not each.endswith("__init__")):
        names = read(ROOT / f"{name.replace('.', '/')}.py").names
        taken = {each if each in MODULES else each.rpartition(".")[0] for each in names}
        graph[name] = (taken & MODULES) - {name}
    assert sum(map(len, graph.values())) > len(MODULES)
    TopologicalSorter(graph).prepare()


def test_nothing_else_lies_at_the_top():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in names if not name.startswith(".")} == TOP


def test_evidence_is_never_unpickled():
    """Only compiled code is, which a process of this user has put where nobody else can write."""
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            unpickles = bool(read(path).tops & {"pickle", "dill", "joblib", "marshal", "shelve"})
            assert unpickles == (path == ROOT / "firmware_sim/compilation.py"), path
            assert "torch.load(" not in source, path


JSON_READERS = {
    "firmware_sim/evidence/canonical.py": "the reader, which refuses a key that an object has twice",
    "inspector/storage/_fsck_formats.py": "a second implementation, which compares with the value's one encoding",
}


def test_one_reader_reads_json():
    for path in sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")):
        spelt = read(path).spelt
        is_reader = any(re.search(r"\bjson\.(loads?|JSONDecoder|decoder)$|^from json\b", each) for each in spelt)
        assert is_reader == (str(path.relative_to(ROOT)) in JSON_READERS), path


@pytest.mark.parametrize("name", FLOORS)
def test_public_names_exist(name):
    package = __import__(name)
    if name != "analysis":
        assert package.__all__
        for public in package.__all__:
            getattr(package, public)


MONITOR = (
    {"_begin"},
    {"environment", "files", "processes", "sharding"},
    {"numerics"},
    {"presets"},
    {"programs"},
    {"declaration"},
    {"loops", "protocol", "transcript"},
    {"replay"},
    {"lab"},
    {"recording"},
    {"adapters", "distributed"},
)
INSPECTOR = (
    {"devices", "probability", "registry", "storage", "wire"},
    {"campaign", "replay"},
    {"inspection"},
    {"rules", "dispute"},
    {"bundle", "delegation"},
    {"rounds"},
)
ANALYSIS = (
    {"words", "glossary", "hidden_sites", "inputs", "public_data", "text", "version"},
    {"scenarios", "montecarlo", "parser", "registration"},
    {"regimes"},
    {"explorer", "docs"},
    {"report", "machines"},
    {"demo_processes"},
    {"demo", "examples"},
    {"bench"},
    {"commands"},
    {"cli", "names"},
)
NUMERICS = ROOT / "monitor" / "numerics"
LAYERS = (
    {"arguments", "errors", "statistics", "strides", "geometry", "switches"},
    {"kernels"},
    {"backend"},
    {"reference"},
    {"engines"},
    {"exact"},
    {"rounding"},
    {"operators"},
    {"_known_convolutions"},
    {"session"},
    {"declared"},
    {"rounded_tiles", "rounded_parts"},
    {"known_answers"},
)
"""Folders and modules, each of which imports none that comes after it, nor another of its own row."""
ENGINES = (
    {"int8_product"},
    {"results", "capability"},
    {"engine"},
    {"eager"},
    {"cpu"},
)


def inside(name: str, folder: str) -> str | None:
    """The part of an imported name that lies in a folder of the numerics; None for any other name."""
    return name.removeprefix(f"{folder}.").split(".")[0] if name.startswith(f"{folder}.") else None


@pytest.mark.parametrize(
    ("folder", "layers"),
    [
        ("monitor", MONITOR),
        ("inspector", INSPECTOR),
        ("analysis", ANALYSIS),
        ("monitor.numerics", LAYERS),
        ("monitor.numerics.engines", ENGINES),
        ("monitor.numerics.engines.eager", ({"exact"}, {"rounded"})),
        ("monitor.numerics.engines.cpu", ({"exact"}, {"rounded"}, {"fused"})),
    ],
)
def test_folders_have_one_direction(folder, layers):
    root = ROOT.joinpath(*folder.split("."))
    rank = {name: number for number, layer in enumerate(layers) for name in layer}
    there = {path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} == set(rank) - {"names"}
    for path in sorted(root.rglob("*.py")):
        own = path.relative_to(root).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for name in read(path).names:
            other = inside(name, folder)
            assert other is None or other not in rank or rank[other] < rank[own] or other == own, (path, name)


LABS_SIDE = ("monitor.lab", "monitor.recording", "monitor.adapters", "monitor.distributed")
"""Parts of the monitor that only a lab runs."""


def test_the_inspector_imports_neither_recorder_nor_lab():
    face = __import__("monitor")
    homes = {name: getattr(getattr(face, name), "__module__", "") for name in face.__all__}
    public = {name for name, home in homes.items() if home.startswith(LABS_SIDE)}
    assert {"Recorder", "SimulatedLab"} <= public
    for path in sorted((ROOT / "inspector").rglob("*.py")):
        for name in read(path).names:
            assert not f"{name}.".startswith(tuple(f"{part}." for part in LABS_SIDE)), (path, name)
            assert name.removeprefix("monitor.") not in public, (path, name)


def test_no_module_with_an_underscore_is_imported_from_another_folder():
    seen = 0
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            here = ".".join(path.relative_to(ROOT).parent.parts)
            for name in read(path).names:
                if name.startswith(tuple(f"{floor}." for floor in FLOORS)):
                    public = name.split("._", 1)[0]
                    assert public == name or f"{public}.".startswith(f"{here}."), (path, name)
                    seen += 1
    assert seen


BY_STRING = {
    "monitor/__init__.py": "a public face, which loads a name when it is first used",
    "inspector/__init__.py": "the same",
    "firmware_sim/__init__.py": "the same",
    "analysis/names/chipwitness/__init__.py": "the same",
    "analysis/commands/__init__.py": "a command's module is loaded when it is asked for",
    "analysis/commands/bench.py": "commands load what they measure with when they run",
    "analysis/commands/registry.py": "commands load what they work with when they run",
}


def test_nothing_is_imported_by_a_string():
    loaders = {"__import__", "import_module", "importlib.import_module", "eval", "exec"}
    for floor in FLOORS:
        for path in sorted((ROOT / floor).rglob("*.py")):
            if str(path.relative_to(ROOT)) not in BY_STRING:
                assert not read(path).called & loaders, path


def test_one_place_asks_where_a_tensor_lies():
    for path in sorted(NUMERICS.rglob("*.py")):
        if path != NUMERICS / "kernels" / "pointers.py":
            source = path.read_text(encoding="utf-8")
            assert ".is_cpu" not in source, path
            assert "device.type" not in source, path


@pytest.mark.parametrize("name", FLOORS)
def test_each_readme_maps_its_package(name):
    root = ROOT / name
    text = (root / "README.md").read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("#")][1:3] == ["## Map", "## Laws"]
    cells = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    mapped = {each.rstrip("/") for each in re.findall(r"`([^`]+)`", cells)}
    there = {path.stem for path in root.glob("*.py")} | {path.parent.name for path in root.glob("*/__init__.py")}
    assert there - {"__init__"} <= mapped
    assert all((root / each).exists() or (root / f"{each}.py").exists() for each in mapped)


def test_no_text_cites_a_document_that_is_not_here():
    outside = re.compile(r"\b(PAPERS|DESIGN|STYLE|ATTACKS)\b")
    for path in sorted(path for floor in (*FLOORS, "tests") for path in (ROOT / floor).rglob("*.py")):
        if path != Path(__file__):
            assert not outside.search(path.read_text(encoding="utf-8")), path


def test_each_case_that_a_test_names_is_listed():
    listed = set(re.findall(r"\b[ABC]\d+\b", (ROOT / "tests" / "README.md").read_text(encoding="utf-8")))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    named = {case.upper() for text in sources for case in re.findall(r"(?<=[_ ])[abc]\d+(?=_)", text)}
    cited = {case for text in sources for case in re.findall(r"\b[ABC]\d{1,2}\b", text)}
    assert len(named) > 40
    assert named <= listed <= named | cited


def test_folders_say_their_idea():
    for path in sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("__init__.py")):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_a_guard_is_switched_off_where_it_is_called():
    """A check that one module defines and another imports when it is loaded is replaced in that one, or stays on."""
    trees = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
    }
    early, every = (
        Counter(
            f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        )
        for nodes in (
            [node for tree in trees.values() for node in tree.body],
            [node for tree in trees.values() for node in ast.walk(tree)],
        )
    )
    for target in {target for changes in GUARDS.values() for target, _ in changes}:
        module, _, name = target.rpartition(".")
        if module in trees and early[target] and early[target] == every[target]:
            names = {node.id for node in ast.walk(trees[module]) if isinstance(node, ast.Name)}
            assert name in names, target
