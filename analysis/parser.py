"""The parser of one command: short help, options from a file, and errors that name the nearest word.

``--help`` shows the options that people use every day, at most fifteen; ``--help-all`` shows all, and what ``--json``
prints. Each option can also stand in a TOML file (``--config FILE``), under its name without dashes; a positional
argument under the name that the help gives it, in lower case. ``--print-config`` writes the file that repeats a call.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from analysis.text import visible

__all__ = ["Parser", "show_every_day", "whole_help"]

_NEGATIVE_NUMBER = re.compile(r"^-(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|infinity|nan)$", re.IGNORECASE)
_MORE = "`%(prog)s --help-all` shows {} more options and the keys of --json."
_KEYS = re.compile(r"^((?:JSON|With|For|Each|Keys|A|An)\b[^:().;]*): (?=[a-z_0-9]+(?: and [a-z_0-9]+)*(?: \(|[,.;]|$))")
"""How a sentence begins that lists the keys of ``--json``."""
_ENDS = re.compile(r"(?<=[.;]) ")
_COMMAS = re.compile(r", ")
_INNER = re.compile(r"(?:(.*?); )?(each|with): (.*)")
"""A meaning that lists keys: of each member of a list, or of an object."""
_CONFIG = "read options from this TOML file; those of the command line override them; --print-config prints such a file"


class _Formatter(argparse.HelpFormatter):
    """Lists the keys of ``--json`` one on a line; other text is filled as argparse does."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # options are copied from here

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = [self._block(each, width, indent) for each in _sentences(text)]
        return "\n".join(blocks)

    def _block(self, text: str, width: int, indent: str) -> str:
        lead = _KEYS.match(text)
        if lead is None:
            return super()._fill_text(text, width, indent)
        within = [
            textwrap.fill(line, width, initial_indent="  " * depth, subsequent_indent="  " * depth + "    ")
            for depth, line in _listed(text[lead.end() :].rstrip(".;"))
        ]
        return "\n".join(indent + line for line in (f"{lead[1]}:", *within))


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and name the nearest word, and which takes negative numbers.

    Attributes:
        everyday: the options that ``--help`` shows, without dashes; empty for all of them.
    """

    everyday: Sequence[str] = ()

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **{"formatter_class": _Formatter, **options})
        self.register("action", "parsers", _Actions)
        # argparse before Python 3.14 takes -1e25 for an option and says that --flop has no value.
        self._negative_number_matcher = _NEGATIVE_NUMBER
        self._words: Sequence[str] = ()
        self._given: list[tuple[argparse.Action, list[str]]] = []
        self._is_whole = False
        self._files: dict[str, Path] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = words = list(args or ())
        if self._subparsers is None:
            self._complete()
            self._words = words = self._from_file(words)
        arguments, rest = super().parse_known_args(words, namespace)
        if rest and self._subparsers is None:  # the command's own parser knows its options
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        if getattr(arguments, "print_config", False) and self._subparsers is None:
            self.exit(0, self._config())
        return arguments, rest

    def format_help(self) -> str:
        """Return the help: of a command with everyday options these alone, unless all were asked for."""
        if self._subparsers is None:
            self._complete()
        rare = [] if not self.everyday or self._is_whole else [each for each in self._actions if self._is_rare(each)]
        helps, keys = [each.help for each in rare], self.epilog
        for each in rare:
            each.help = argparse.SUPPRESS
        self.epilog = _MORE.format(len(rare)) if rare else keys
        try:
            return super().format_help()
        finally:
            self.epilog = keys
            for each, text in zip(rare, helps, strict=True):
                each.help = text

    def _is_rare(self, action: argparse.Action) -> bool:
        usual = {f"--{name}" for name in (*self.everyday, "help", "help-all", "config", "json")}
        is_seen = bool(action.option_strings) and action.help != argparse.SUPPRESS
        return is_seen and not usual & set(action.option_strings) and not action.required

    def _complete(self) -> None:
        """Add the options that every command has."""
        if "--config" in self._option_string_actions:
            return
        self.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG)
        self.add_argument("--print-config", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        text = "show all options and the keys of --json" if self.everyday else argparse.SUPPRESS
        self.add_argument("--help-all", action=_WholeHelp, nargs=0, help=text)

    def _from_file(self, words: list[str]) -> list[str]:
        """Return the words of ``--config FILE`` and then the others."""
        for place, word in enumerate(words):
            if word == "--":
                break
            name, is_joined, value = word.partition("=")
            if name == "--config":
                following = words[place + 1 : place + 2] if not is_joined else [value]
                if not following:
                    self.error("argument --config: expected one argument")
                rest = words[:place] + words[place + (1 if is_joined else 2) :]
                return self._words_of(Path(following[0])) + rest
        return words

    def _words_of(self, path: Path) -> list[str]:
        import tomllib

        from firmware_sim import limits
        from firmware_sim.errors import CallerError, EvidenceError, file_error

        try:
            entries = tomllib.loads(limits.read_file(path, limits.SCENARIO_BYTES).decode())
        except OSError as error:
            raise file_error(f"cannot read {path}", error) from None
        except (EvidenceError, ValueError, RecursionError) as error:
            raise CallerError(f"{path} is not TOML that can be read: {error}") from None
        options: list[str] = []
        positional: list[str] = []
        for key, value in entries.items():
            actions = self._by_key()
            if key not in actions or key in ("config", "print-config", "help", "help-all"):
                self.error(f"{path}: there is no option {key!a:.100}{_nearest(key, actions)}")
            self._files[f"--{key}"] = path
            action, values = actions[key], value if isinstance(value, list) else [value]
            if not values or any(not isinstance(each, str | int | float) for each in values):
                self.error(f"{path}: {key} must be a string, a number, true, false or a list of these")
            if action.nargs != "?" and any(isinstance(each, bool) != (action.nargs == 0) for each in values):
                self.error(f"{path}: {key} must be {'true or false' if action.nargs == 0 else 'a string or a number'}")
            if not action.option_strings:
                positional += [str(each) for each in values]
            elif action.nargs == "+":
                options = [f"--{key}", *map(str, values), *options]
            else:
                given = [each for each in values if each is not False]
                options += [f"--{key}" if each is True else f"--{key}={each}" for each in given]
        return options + positional

    def _by_key(self) -> dict[str, argparse.Action]:
        """Each argument under its key in a file of options."""
        found = {}
        for action in self._actions:
            names = [each for each in action.option_strings if each.startswith("--")]
            found[names[0].removeprefix("--") if names else action.dest.replace("_", "-")] = action
        return found

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self._given.append((action, list(arg_strings)))
        return super()._get_values(action, arg_strings)

    def _config(self) -> str:
        """Return the file that repeats the words that were parsed."""
        keys = {action: key for key, action in self._by_key().items()}
        values: dict[str, list[str]] = {}
        lines = []
        for action, words in self._given:
            if keys[action] == "print-config":
                continue
            if action.nargs == 0 or (action.nargs == "?" and action.option_strings and not words):
                lines.append(f"{keys[action]} = true\n")
            elif words:
                known = values.setdefault(keys[action], [])
                known[:] = [*known, *words] if isinstance(action, argparse._AppendAction) else words
        for key, words in values.items():
            texts = [_as_toml(each) for each in words if each != "--"]
            lines.append(f"{key} = {texts[0] if len(texts) == 1 else '[' + ', '.join(texts) + ']'}\n")
        return "".join(lines)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(each) for each in action.choices]
            text = f"there is no {value!r}{_nearest(str(value), choices)}; choose from {', '.join(choices)}"
            raise argparse.ArgumentError(action, text)

    def error(self, message: str) -> NoReturn:
        file = self._files.get(re.sub(r"^argument (?:-\w/)?([\w-]+).*", r"\1", message, flags=re.DOTALL))
        message = message if file is None else f"{file}: {message.removeprefix('argument ')}"
        known = self._option_string_actions
        wrong = [word.partition("=")[0] for word in self._words if word.startswith("--") and word != "--"]
        for word in wrong:
            nearest = _nearest(word, known)
            if not any(option.startswith(word) for option in known) and (nearest or "unrecognized" not in message):
                message += f"; there is no {word}{nearest}"
        self.exit(2, visible(f"{self.prog}: {message}") + "\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if status == 0 and message:
            print(message, end="")
            message = None
        super().exit(status, message)


class _Actions(argparse._SubParsersAction):  # type: ignore[type-arg]
    """Parts of a command: the line about one in the list is its description, too."""

    def add_parser(self, name: str, **options: Any) -> Any:
        line = options.get("help")
        described = {"description": f"{line[0].upper()}{line[1:]}."} if line else {}
        return super().add_parser(name, **{**described, **options})


class _WholeHelp(argparse.Action):
    """``--help-all``."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        parser.exit(0, whole_help(parser))


def show_every_day(parser: argparse.ArgumentParser, names: str) -> None:
    """Name the options, without dashes, that ``--help`` of a command shows; ``--help-all`` shows the others too."""
    assert isinstance(parser, Parser)
    parser.everyday = names.split()


def whole_help(parser: argparse.ArgumentParser) -> str:
    """Return the help of a command with all options and the keys of ``--json``."""
    assert isinstance(parser, Parser)
    parser._is_whole = True
    return parser.format_help()


def _listed(keys: str, depth: int = 1) -> Iterator[tuple[int, str]]:
    """Lines of a list of keys, each with its depth: a line for a key with a meaning, and one for those between."""
    plain: list[str] = []
    for key in _split(keys, _COMMAS):
        name, is_explained, meaning = key.partition(" (")
        if not is_explained:
            plain.append(key)
            continue
        if plain:
            yield depth, ", ".join(plain)
        plain, name, meaning = [], name.replace(" and ", ", "), meaning.removesuffix(")")
        if inner := _INNER.fullmatch(meaning):
            kind = "a list; each of" if inner[2] == "each" else "an object of"
            before = f"{inner[1]}; " if inner[1] else ""
            yield depth, f"{name}: {before.replace('else;', 'else')}{kind}"
            yield from _listed(inner[3], depth + 1)
        else:
            yield depth, f"{name}: {meaning}"
    if plain:
        yield depth, ", ".join(plain)


def _split(text: str, ends: re.Pattern[str]) -> list[str]:
    """Parts of a text, which ends only where no parenthesis is open."""
    found, start = [], 0
    for match in ends.finditer(text):
        if text.count("(", start, match.start()) == text.count(")", start, match.start()):
            found.append(text[start : match.start()])
            start = match.end()
    return [*found, text[start:]]


def _sentences(text: str) -> list[str]:
    """Sentences that list keys, and the text between them."""
    found: list[str] = []
    is_prose = False
    for sentence in _split(" ".join(text.split()), _ENDS):
        lists = _KEYS.match(sentence) is not None
        if is_prose and not lists:
            found[-1] += f" {sentence}"
        else:
            found.append(sentence)
        is_prose = not lists
    return found


def _as_toml(text: str) -> str:
    """Return a word as a number where TOML prints the same one, and else as a text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if str(kind(text)) == text and text not in ("nan", "inf", "-inf"):
                return text
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _nearest(word: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" (did you mean {nearest[0]}?)" if nearest else ""
