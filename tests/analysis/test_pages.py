"""README and the manual's pages, as a reader would use them: each page from its top to its end, in one folder.

A block of Python or TOML begins with a comment that names the file in which a reader saves it. Of a block ``console``
each line that begins with ``$`` is run, and what follows it is what it prints: ``…`` is any text within a line, and any
lines where it is alone.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.cli import main
from analysis.commands.dispatch import build_parser
from analysis.docs.reference import leaves

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "analysis" / "docs").glob("*.md"))]
TEXTS = [*PAGES, *ROOT.glob("*/README.md"), *ROOT.glob("analysis/data/*.md"), ROOT / ".github" / "CONTRIBUTING.md"]

SLOW = {
    "chipwitness devices": "a minute: it starts each of 15 devices; test_run_commands.py runs it",
}
"""Commands that no test runs from a page, and why; their options are parsed."""

CODES = {"REJECT": 1, "INCONCLUSIVE": 3}
FAILS = {
    "chipwitness check refused.py",
    "chipwitness inspect cheat --trust cheat.trust.json --samples 3 --json > cheat.verdict.json",
    "python resume.py crash",
}
"""Commands that a page runs to show how they end with 1."""

STARTS = {"python": sys.executable, "torchrun": f"{sys.executable} -m torch.distributed.run --local-addr 127.0.0.1"}
"""What starts processes: those of the environment in which the tests run, which meet on this machine."""


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block, in order."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(content: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, and what is shown below it."""
    for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        yield line, shown


def pattern(shown: str) -> str:
    """A regular expression for what is shown."""
    lines = shown.splitlines()
    return "".join(
        r"(?:.*\n)*" if line.strip() == "…" else re.escape(line).replace("…", ".*") + r"\s*\n" for line in lines
    )


def run(words: list[str]) -> int:
    """The exit code of our own commands and programs, in this process."""
    try:
        if words[0] == "chipwitness":
            return main(words[1:])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def call(line: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of a line; programs that are not ours run in a shell, where this machine has them."""
    own, _, others = line.partition(" | ")
    own, _, file = own.partition(" > ")
    words = shlex.split(own)
    capfd.readouterr()
    if words[0] == "chipwitness" or (words[0] == "python" and line not in FAILS):
        code = run(words)
    else:
        if words[0] in STARTS:
            own = own.replace(words[0], STARTS[words[0]])
        elif shutil.which(words[0]) is None:
            pytest.skip(f"{words[0]} is not installed")
        code = subprocess.run(own, shell=True, check=False).returncode
    printed = "".join(capfd.readouterr())
    if file:
        Path(file).write_text(printed)
        printed = ""
    if others:
        printed = subprocess.run(others, shell=True, input=printed, stdout=-1, text=True, check=True).stdout
    return code, printed


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("ACCEPT\n  …\n", "ACCEPT\n  one\n  two\n", True),
        ("ACCEPT\n…\nlast\n", "ACCEPT\nlast\n", True),
        ("a … of 3\n", "a part of 3 \n", True),
        ("a … of 3\n", "a part of 4\n", False),
        ("ACCEPT\n", "ACCEPT\nmore\n", False),
        ("ACCEPT\n…\n", "REJECT\nmore\n", False),
        ("a.c\n", "abc\n", False),
    ],
)
def test_what_is_shown_is_what_is_printed(shown, printed, same):
    assert bool(re.fullmatch(pattern(shown), printed)) is same


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_runs_as_it_is_read(page, tmp_path, monkeypatch, capfd, kept_devices):
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    digest = ""
    for language, content in blocks(page.read_text("utf-8")):
        if language in ("python", "toml"):
            name = re.match(rf"# (\S+\.{language[:2]}\w*)\n", content)
            assert name, f"a block names no file: {content[:80]}"
            assert not (tmp_path / name[1]).exists(), name[1]
            (tmp_path / name[1]).write_text(content)
        for line, shown in commands(content) if language == "console" else ():
            if line in SLOW:
                continue
            for each in line.split(" && "):
                code, printed = call(each.replace("sha256:…", digest), capfd)
                digest = re.findall(r"sha256:\w+|$", printed.strip().rpartition("\n")[2])[0] or digest
                expected = 1 if line in FAILS else CODES.get(shown.split("\n")[0] or printed.split("\n")[0], 0)
                assert code == expected, f"$ {line}\n{printed}"
            assert re.fullmatch(pattern(shown) if shown else r"(?:.*\n)*", printed), f"$ {line}\n{printed}"


def test_no_page_shows_what_is_not_checked():
    """Every block has a language that says how it is checked, or is no program."""
    seen = set()
    for page in PAGES:
        for language, content in blocks(page.read_text("utf-8")):
            assert language in ("python", "toml", "console", "text", ""), (page, language)
            if language in ("text", ""):
                assert not re.search(r"^(\$|import |from |\[\[)", content, re.MULTILINE), (page, content)
            elif language == "console":
                seen |= {line for line, _ in commands(content)}
    assert SLOW.keys() | FAILS <= seen


KNOWN = {name.removeprefix("chipwitness "): parser for name, parser in leaves(build_parser())}


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Every option of a command."""
    parser.format_help()  # adds those that every command has
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.stem if path.stem != "README" else path.parent.name)
def test_commands_within_a_sentence_exist(page):
    """Their names and options, wherever a span of code begins with a command."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    spans += [line for line in SLOW if line in page.read_text("utf-8")]
    for span in spans:
        words = span.removeprefix("chipwitness ").split()
        own = span.startswith("chipwitness ") or len(words) > 1
        leaf = [name for name in KNOWN if words[: len(name.split())] == name.split()]
        group = [name for name in KNOWN if name.split()[: len(words)] == words]
        if not own or not (leaf or words[0] in {name.split()[0] for name in KNOWN}):
            assert not span.startswith("chipwitness ") or words[0].startswith("-"), span
            continue
        if leaf:
            asked = {word.split("=")[0] for word in re.findall(r"(?<!\S)--[a-z-]+", span)}
            assert asked <= options(KNOWN[leaf[0]]), span
        else:
            assert group or "|" in span or words[1].isupper() or words[1].startswith("-"), span


def test_shown_measurements_are_the_committed_ones():
    rows = json.loads((ROOT / "analysis" / "data" / "evasions.json").read_text())["rows"]
    measured = {row["work"]: f"{row['caught']} of {row['trials']} | {row['predicted']:.2f}" for row in rows}
    page = (ROOT / "analysis" / "docs" / "evasions.md").read_text("utf-8")
    shown = re.findall(r"^\| `([\w-]+)` .*\| (\d+ of \d+ \| [\d.]+) \|$", page, re.MULTILINE)
    assert len(shown) == 9
    assert dict(shown).items() <= measured.items()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_sentences_use_the_plain_word(page):
    text = re.sub(r"^```.*?^```$|`[^`]+`", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"(?i)\b(beside|told|stands|whoever|nobody|of its own)\b", text)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize(
    "page", [*TEXTS, ROOT / ".github" / "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), link
            if anchor:
                headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
                assert anchor in {slug(each) for each in headings}, link


def test_the_readme_is_short_and_installs_as_ci_does():
    readme, ci = (ROOT / "README.md").read_text("utf-8"), (ROOT / ".ci" / "run").read_text("utf-8")
    assert len(readme.encode()) <= 10_240
    installed = re.search(r"pip install .*(-c .*)", ci)
    assert installed
    assert f"pip install {installed[1]} && pytest" in readme
