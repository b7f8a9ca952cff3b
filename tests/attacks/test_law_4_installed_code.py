"""What a lab puts beside its run, above it or where the inspector works is run by no process of an inspection."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import pytest

from analysis.cli import main
from firmware_sim.folders import own_folder
from monitor.transcript import RunFolder
from tests.guards import off

pytestmark = pytest.mark.usefixtures("started_processes")
ROOT = Path(__file__).parents[2]
PACKAGES = ("firmware_sim", "monitor", "inspector", "analysis")
MARK = "it was run"
FATAL = 'import os; open({mark!r}, "a").write(__name__ + chr(10)); os._exit(77)\n'
SETTINGS = {
    ".numba_config.yaml": "cache_dir: {place}/.c\ndisable_jit: 1\n",
    "matplotlibrc": "axes.titlesize: \033[31mACCEPT\nbackend: module://planted\nsavefig.facecolor: red\n",
    ".c/entry.nbi": "cos\nsystem\n(S'false'\ntR.",
    "pyvenv.cfg": "home = {place}\n",
    "torch_compile.cfg": "[torch]\n",
}
"""What libraries read where a process works, and a cache of compiled code."""
VARIABLES = {
    "NUMBA_DISABLE_JIT": "1",
    "NUMBA_CACHE_DIR": "{place}/.c",
    "MATPLOTLIBRC": "{place}/matplotlibrc",
    "MPLBACKEND": "module://planted",
    "PYTHONSTARTUP": "{place}/torch.py",
    "TORCH_LOGS": "+all",
    "KMP_AFFINITY": "verbose",
    "LD_LIBRARY_PATH": "{place}",
}
ANSWERS = """
import importlib.util as util, os, sys
spec = util.spec_from_file_location("json", os.path.join(os.path.dirname(os.__file__), "json", "__init__.py"))
real = util.module_from_spec(spec)
sys.modules["json"] = real
spec.loader.exec_module(real)
plain, told = real.dumps, real.loads(open({answers!r}).read())

def dumps(value, *given, **options):
    for replay in value.get("replays", ()) if isinstance(value, dict) else ():
        _, begin, end = replay["segment"]
        replay.update(leaves=told[begin + 1 : end + 1], contradiction=None)
    return plain(value, *given, **options)

real.dumps = dumps
"""
"""A module ``json`` for the devices' processes, which answers what the lab has recorded."""
WORDS = ("--samples", "1", "--now", "2026-01-01T00:30:00Z", "--device", "sse41", "--json", "--seed")


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Every first name of what a device's process imports, and what an interpreter looks for."""
    code = "import inspector.replay._worker, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted({*found.stdout.split(), "sitecustomize", "usercustomize", "planted"} - {"__main__"})


def plant(place: Path, names: list[str], mark: Path) -> None:
    """Put a module of each name, and each settings file, into a folder."""
    for name in names:
        if not (place / name).exists():
            (place / f"{name}.py").write_text(FATAL.format(mark=str(mark)))
    for name, text in SETTINGS.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text.format(place=place))


@pytest.fixture
def cheat(make_run):
    """A run whose last step takes another sample; not every chip took a snapshot within it."""
    return make_run("cheat", lie="change-sample", lie_step=6, rate=Fraction(1, 3))


def inspected(recorded, seed, capsys) -> str:
    """Outcome of an inspection by devices' processes of its own."""
    run = recorded.run
    main(["inspect", str(run), "--trust", str(run.with_name(f"{run.name}.trust.json")), *WORDS, seed])
    return json.loads(capsys.readouterr().out)["outcome"]


def test_a_module_beside_the_run_answers_for_no_device(cheat, capsys, monkeypatch):
    """Row A30."""
    folder = cheat.run.parent
    run = RunFolder(cheat.run, cheat.trust.labs["lab"])
    (folder / "answers").write_text(json.dumps([leaf.to_json() for leaf in run.load_steps()[0]]))
    (folder / "json.py").write_text(ANSWERS.format(answers=str(folder / "answers")))
    monkeypatch.chdir(folder)
    assert inspected(cheat, "s0", capsys) == "REJECT"
    with off("installed code"):
        assert "ACCEPT" in (inspected(cheat, f"s{number}", capsys) for number in range(6))


@pytest.mark.parametrize("guard", ["installed code", None])
def test_modules_and_settings_inside_a_run_are_run_by_nothing(make_run, names, capsys, monkeypatch, tmp_path, guard):
    """Rows A30 and A31, from the run's own folder: what is not listed there is ignored, and runs nowhere."""
    honest, mark = make_run("honest", steps=2), tmp_path / MARK
    assert inspected(honest, "s0", capsys) != "REJECT"
    plant(honest.run, names, mark)
    monkeypatch.chdir(honest.run)
    with off(guard) if guard else nullcontext():
        assert inspected(honest, "s0", capsys) != "REJECT"
    assert mark.exists() is (guard is not None)


TOLD = """
import numba, matplotlib
print(numba.config.DISABLE_JIT, numba.config.CACHE_DIR, matplotlib.rcParams["savefig.facecolor"])
"""


def test_settings_of_a_folder_decide_where_nothing_guards(tmp_path):
    """What is planted in the tests below does work: an interpreter that is started there reads it."""
    plant(tmp_path, [], tmp_path / MARK)
    done = subprocess.run([sys.executable, "-c", TOLD], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", f"{tmp_path}/.c", "red"]


def environment_with(place: Path, *, copied: bool) -> Path:
    """The interpreter of a new virtual environment: the product in its packages, or a link to the checkout."""
    venv.create(place / "venv", symlinks=True)
    packages = place / "venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    if copied:
        for name in PACKAGES:
            shutil.copytree(ROOT / name, packages / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
    lines = [each for each in sys.path if "-packages" in each]
    (packages / "beside.pth").write_text("\n".join([*lines, *([] if copied else [str(ROOT)])]) + "\n")
    return place / "venv" / "bin" / "python"


ASKS = """
import json, sys
from inspector.replay.pool import DevicePool
import monitor
with DevicePool(workers=1, threads=1) as devices:
    found = devices.run("sse41", {"action": "replay", "run": "/nowhere", "manifest": None, "lab_key": "00" * 32})
print(json.dumps([found["device"], "evidence_error" in found, monitor.__file__]))
"""


@pytest.mark.parametrize("copied", [True, False], ids=["wheel", "editable"])
def test_no_module_and_no_settings_are_taken_from_where_a_command_works(copied, names, tmp_path):
    """Rows A30 and A31: the folder, the one above it, and variables that are not named."""
    python, place, mark = environment_with(tmp_path, copied=copied), tmp_path / "work" / "here", tmp_path / MARK
    place.mkdir(parents=True)
    for folder in (place, place.parent):
        plant(folder, names, mark)
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    given = {**os.environ, **{name: text.format(place=place) for name, text in VARIABLES.items()}}
    command = [str(python), "-P", str(script)]
    done = subprocess.run(command, cwd=place, env=given, capture_output=True, text=True, check=False)
    assert not mark.exists(), mark.read_text()
    device, answered, home = json.loads(done.stdout)
    assert (device, answered) == ("sse41", True), done.stderr
    assert Path(home).is_relative_to(tmp_path if copied else ROOT)


DRAWS = """
import os, sys
sys.path.append({root!r})
from analysis.cli import main
sys.exit(main())
"""


def test_a_command_reads_no_settings_of_its_folder_or_its_variables(names, tmp_path):
    """Rows A31 and B20: numba's, matplotlib's, and an interpreter's; nothing is printed that they say."""
    place, mark, script = tmp_path / "here", tmp_path / MARK, tmp_path / "chipwitness"
    place.mkdir()
    plant(place, names, mark)
    script.write_text(DRAWS.format(root=str(ROOT)))
    drawn = []
    for where, given in ((tmp_path, {}), (place, {name: text.format(place=place) for name, text in VARIABLES.items()})):
        words = ["curve", "samples", "--out", str(tmp_path / "figure.png")]
        command = [sys.executable, str(script), *words]
        done = subprocess.run(command, cwd=where, env={**os.environ, **given}, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        drawn.append((done.stdout, (tmp_path / "figure.png").read_bytes()))
    assert drawn[0] == drawn[1]
    assert not mark.exists(), mark.read_text()


def test_a_cache_that_another_can_write_to_is_none_and_what_another_put_there_is_gone(tmp_path, monkeypatch):
    """Row A31: compiled code is loaded from where the user alone can write."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere" / "else"))
    monkeypatch.setattr("firmware_sim.folders.os.makedirs", lambda *_, **__: None)
    folder = own_folder("compiled")
    assert folder is not None
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    mine, linked = Path(folder, "mine.nbi"), Path(folder, "linked.nbi")
    mine.write_text("")
    linked.symlink_to(tmp_path)
    assert own_folder("compiled") == folder
    assert (mine.exists(), linked.exists()) == (True, False)
    Path(folder).chmod(0o777)
    assert own_folder("compiled") is None
    Path(folder).rename(tmp_path / "else")
    Path(folder).symlink_to(tmp_path / "else")
    assert own_folder("compiled") is None
