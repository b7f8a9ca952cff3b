"""Every command's help fits on a screen, and its options can come from a file."""

from __future__ import annotations

import re

import pytest

from analysis.commands.dispatch import build_parser, run
from analysis.docs.reference import leaves

COMMANDS = dict(leaves(build_parser()))
LONG = ["alarms", "campaign", "inspect", "plan", "table", "train"]


def options_in(help_text: str) -> list[str]:
    """The options that a help explains, in order."""
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", help_text, re.MULTILINE)


def printed(capsys, *words: str) -> str:
    """What a call prints that ends while its words are parsed."""
    with pytest.raises(SystemExit) as end:
        run(words)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_at_most_fifteen_options(name):
    assert 1 <= len(options_in(COMMANDS[name].format_help())) <= 15


@pytest.mark.parametrize("name", LONG)
def test_all_options_are_one_call_away(capsys, name):
    short = printed(capsys, name, "--help")
    whole = printed(capsys, name, "--help-all")
    assert set(options_in(short)) < set(options_in(whole))
    hidden = len(options_in(whole)) - len(options_in(short))
    assert f"shows {hidden} more options" in " ".join(short.split())
    assert "JSON keys" in whole
    assert "JSON keys" not in short


def test_a_printed_file_repeats_its_call(capsys, tmp_path):
    words = ["--flop", "1e25", "--site", "a=1000", "--site", 'b "x"=2,000', "--days", "90/120/150", "--json"]
    first = printed(capsys, "plan", *words, "--print-config")
    file = tmp_path / "plan.toml"
    file.write_text(first)
    assert printed(capsys, "plan", "--config", str(file), "--print-config") == first
    assert printed(capsys, "plan", f"--config={file}", "--print-config") == first
    assert run(["plan", *words, "--draws", "20"]) == run(["plan", "--config", str(file), "--draws", "20"]) == 0
    half = len(text := capsys.readouterr().out) // 2
    assert text[:half] == text[half:]


def test_options_of_the_command_line_come_after_those_of_the_file(capsys, tmp_path):
    file = tmp_path / "odds.toml"
    file.write_text('flop = 1e25\nsite = "a=1000"\ndays = 30\n')
    shown = printed(capsys, "plan", "--config", str(file), "--days", "60", "--site", "b=5", "--print-config")
    assert 'site = ["a=1000", "b=5"]' in shown
    assert "days = 60" in shown
    assert "days = 30" not in shown


def test_an_option_with_an_optional_value_is_true_without_it(capsys, tmp_path):
    file = tmp_path / "campaign.toml"
    for words, line in ((["--keys"], "keys = true\n"), (["--keys", "fleet"], 'keys = "fleet"\n')):
        assert printed(capsys, "campaign", *words, "--print-config") == line
        file.write_text(line)
        assert printed(capsys, "campaign", "--config", str(file), "--print-config") == line


def test_a_list_of_values_is_an_array(capsys, tmp_path):
    file = tmp_path / "leakage.toml"
    words = ["--fleet", "9", "--census", "4", "--diverted", "1", "2", "--months", "3", "0.5"]
    first = printed(capsys, "registry", "leakage", *words, "--print-config")
    assert "diverted = [1, 2]\n" in first
    file.write_text(first)
    again = printed(capsys, "registry", "leakage", "--config", str(file), "--print-config")
    assert sorted(again.splitlines()) == sorted(first.splitlines())


def test_positional_arguments_come_from_a_file_too(capsys, tmp_path):
    file = tmp_path / "inspect.toml"
    file.write_text('runs = ["one", "two"]\nsamples = 2\n')
    shown = printed(capsys, "inspect", "--config", str(file), "--print-config")
    assert shown == 'samples = 2\nruns = ["one", "two"]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flopp = 1", "there is no option 'flopp' (did you mean flop?)"),
        ("help = true", "there is no option 'help'"),
        ("config = 'x'", "there is no option 'config'"),
        ("sensitivity = 1", "sensitivity must be true or false"),
        ("sensitivity = []", "sensitivity must be a string, a number"),
        ("days = true", "days must be a string or a number"),
        ("days = [1, true]", "days must be a string or a number"),
        ("days = {a = 1}", "days must be a string, a number, true, false or a list of these"),
        ("days = 2026-01-01", "days must be a string, a number, true, false or a list of these"),
        ("days = ", "is not TOML that can be read"),
        ("days = 'x'", "--days"),
    ],
)
def test_a_file_at_fault_is_one_line_that_names_it(capsys, tmp_path, text, said):
    file = tmp_path / "plan.toml"
    file.write_text(text)
    code: int | str | None
    try:
        code = run(["plan", "--config", str(file), "--flop", "1e25", "--today"])
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr().err
    assert code == 2
    assert shown.count("\n") == 1
    assert said in shown


def test_a_file_that_is_missing_is_the_callers_mistake(capsys, tmp_path):
    assert run(["plan", "--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_the_words_of_a_checked_script_are_its_own(tmp_path, capsys):
    script = tmp_path / "loop.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    run(["check", str(script), "--", "--config", "mine.toml"])
    assert "['--config', 'mine.toml']" in capsys.readouterr().err
