"""The place of each key of a TOML document, and a reader that refuses what it does not know.

The standard library parses TOML without positions. The scan below runs over text that it has accepted already, so it
only needs to tell keys, values and brackets apart.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error, is_about_name
from firmware_sim.evidence.canonical import JsonObject
from inspector.probability.distributions import FORMS, Distribution, Domain, parse

__all__ = ["Numbers", "ScenarioError", "Table", "read_toml"]

Path_ = tuple[str | int, ...]
T = TypeVar("T")
_KEY = re.compile(r"[A-Za-z0-9_-]+|\"(?:[^\"\\]|\\.)*\"|'[^']*'")
_BARE = re.compile(r"[^\s,\]}#]+")
_NAMED = re.compile(r"\b([a-z][a-z-]*)\.([a-z_]+)\b")
_ANY = (-math.inf, math.inf)
_INSTEAD = {"flop": "model", "threshold_flop": "model", "count": "stock"}
"""Keys that replace others."""


class ScenarioError(CallerError):
    """A scenario file is wrong; the text names file, line and key."""


class _Scan:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.lines: dict[Path_, int] = {(): 1}
        self.sizes: dict[Path_, int] = {}

    def run(self) -> dict[Path_, int]:
        table: Path_ = ()
        while self._skip(lines=True):
            if self.text.startswith("[[", self.at):
                table = self._header(2)
            elif self.text[self.at] == "[":
                table = self._header(1)
            else:
                self._pair(table)
        return self.lines

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _skip(self, *, lines: bool) -> bool:
        blank = " \t\r\n" if lines else " \t"
        while self.at < len(self.text):
            if self.text[self.at] in blank:
                self.at += 1
            elif self.text[self.at] == "#" and lines:
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return True
        return False

    def _dotted(self) -> Iterator[str]:
        while True:
            self._skip(lines=False)
            match = _KEY.match(self.text, self.at)
            if match is None:
                raise ScenarioError(f"line {self._line()}: unreadable key")
            self.at = match.end()
            word = match.group()
            # A quoted key may hold escapes; the parser resolves them.
            yield next(iter(tomllib.loads(f"{word} = 0"))) if word[0] in "\"'" else word
            self._skip(lines=False)
            if self.text[self.at] != ".":
                return
            self.at += 1

    def _under(self, base: Path_, key: str) -> Path_:
        """Return the path of ``key`` in ``base``, inside the last entry if it is an array of tables."""
        path = (*base, key)
        return (*path, self.sizes[path] - 1) if path in self.sizes else path

    def _header(self, brackets: int) -> Path_:
        line = self._line()
        self.at += brackets
        words = list(self._dotted())
        self.at += brackets
        path: Path_ = ()
        for word in words[:-1]:
            path = self._under(path, word)
        last = (*path, words[-1])
        if brackets == 2:
            self.sizes[last] = self.sizes.get(last, 0) + 1
            self.lines.setdefault(last, line)
            last = (*last, self.sizes[last] - 1)
        self.lines[last] = line
        return last

    def _pair(self, table: Path_) -> None:
        line = self._line()
        path = table
        for word in self._dotted():
            path = (*path, word)
            self.lines.setdefault(path, line)
        self.at += 1
        self._value(path)

    def _value(self, path: Path_) -> None:
        self._skip(lines=True)
        self.lines.setdefault(path, self._line())
        for quote in ('"""', "'''", '"', "'"):
            if self.text.startswith(quote, self.at):
                return self._string(quote)
        if self.text[self.at] == "[":
            return self._sequence(path, "]")
        if self.text[self.at] == "{":
            return self._sequence(path, "}")
        match = _BARE.match(self.text, self.at)
        self.at = match.end() if match else self.at + 1
        return None

    def _string(self, quote: str) -> None:
        self.at += len(quote)
        while not self.text.startswith(quote, self.at):
            self.at += 2 if self.text[self.at] == "\\" and quote[0] == '"' else 1
        self.at += len(quote)
        # A multi-line string may end in one or two quotes that belong to its text.
        while len(quote) == 3 and self.text.startswith(quote[0], self.at):
            self.at += 1

    def _sequence(self, path: Path_, closing: str) -> None:
        self.at += 1
        index = 0
        while self._skip(lines=True) and self.text[self.at] != closing:
            if self.text[self.at] == ",":
                self.at += 1
                index += 1
            elif closing == "]":
                self._value((*path, index))
            else:
                self._pair(path)
        self.at += 1


class Numbers:
    """What a file's uncertain numbers are read as: the values in ``at`` by their dotted keys, else their medians.

    ``met`` collects the distributions, ``asked`` the keys that readers ask for, by the path of their table. ``spans``
    holds the least and the greatest number that each key may hold, by table and key: outside, its unit is another.
    """

    def __init__(
        self, at: Mapping[str, float] | None = None, spans: Mapping[tuple[str, str], tuple[float, float]] | None = None
    ) -> None:
        self.met: dict[str, Distribution] = {}
        self.asked: dict[str, set[str]] = {}
        self.spans = spans or {}
        self.document: JsonObject = {}
        self._at = at or {}

    def read(self, name: str, text: str, domain: Domain) -> tuple[float, float, float]:
        """Return the value of the number ``name``, and its 5 % and 95 % quantile.

        Raises:
            CallerError: the text is no distribution.
        """
        self.met[name] = parse(text, domain)
        low, middle, high = (float(each) for each in self.met[name].ppf([0.05, 0.5, 0.95]))
        return self._at.get(name, middle), low, high


class Table:
    """A TOML table that is read key by key; `close` refuses the keys that were not read."""

    def __init__(self, data: JsonObject, path: Path_, lines: dict[Path_, int], source: str, numbers: Numbers) -> None:
        self._data, self._path, self._lines, self._source = data, path, lines, source
        self._numbers = numbers
        self._known: list[str] = []

    def fail(self, message: str, key: str | None = None, path: Path_ | None = None) -> ScenarioError:
        """Return an error at ``key``, or at the table; ``path`` is the key's where it is in another one."""
        path = path or (self._path if key is None else (*self._path, key))
        name = _dotted(path)
        while path and path not in self._lines:
            path = path[:-1]
        where = f"{name}: " if name and not message.startswith(name) else ""
        return ScenarioError(f"{self._source}, line {self._lines.get(path, 1)}: {where}{message}")

    def has(self, key: str) -> bool:
        """Return whether the key is there."""
        return key in self._data

    def is_text(self, key: str) -> bool:
        """Return whether the key is there and holds a text."""
        return isinstance(self._data.get(key), str)

    def _get(self, key: str, kinds: tuple[type, ...], what: str) -> Any:
        self._known.append(key)
        self._numbers.asked.setdefault(_plain(self._path), set()).add(key)
        if key not in self._data:
            return None
        value = self._data[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.fail(f"must be {what}, got {value!r:.200}", key)
        if isinstance(value, int) and value.bit_length() > limits.JSON_INTEGER_BITS.most:
            raise self.fail(f"must be {what} of at most {limits.JSON_INTEGER_BITS.most} bits", key)
        return value

    def _need(self, key: str, value: T | None) -> T:
        if value is None:
            raise self.fail(f"key {key!r} is missing")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text; a missing one without default is an error."""
        value: str | None = self._get(key, (str,), "a text")
        return self._need(key, default if value is None else value)

    def number(self, key: str, default: float | None = None, *, share: bool = False) -> float:
        """Return a number, which may be uncertain, between 0 and 1 if a ``share``; a missing one needs a default."""
        value = self._get(key, (int, float, str), "a number")
        if isinstance(value, str):
            return self._drawn(key, value, Domain.SHARE if share else Domain.POSITIVE)
        if value is None:
            return self._need(key, default)
        self._within(key, value, any_=(0, 1) if share else _ANY)
        return float(value)

    def _within(self, key: str, *values: float, any_: tuple[float, float] = _ANY) -> None:
        """Refuse numbers that cannot be meant; ``any_`` is the span of a key that the list of keys does not name."""
        low, high = self._numbers.spans.get((_plain(self._path), key), any_)
        for value in values:
            if not math.isfinite(value):
                raise self.fail(f"must be a finite number, got {value!r}", key)
            if not low <= value <= high:
                unit = ": is it in another unit?" if value > 0 else ""
                raise self.fail(f"must be between {low:g} and {high:g}, got {value:g}{unit}", key)

    def _drawn(self, key: str, text: str, domain: Domain) -> float:
        if text[:1].isdigit() and text.replace(".", "").isdigit():
            raise self.fail(
                f"must be a number, got {text!r:.200}: without quotes, or uncertain, as one of {FORMS}", key
            )
        try:
            value, *ends = self._numbers.read(_dotted((*self._path, key)), text, domain)
        except CallerError as error:
            raise self.fail(f"must be a number: {error}", key) from None
        self._within(key, *ends)
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number; 1e6 counts as one, and draws of an uncertain one are rounded."""
        value: int | float | str | None = self._get(key, (int, float, str), "a whole number")
        if value is None:
            return self._need(key, default)
        if isinstance(value, str):
            return round(self._drawn(key, value, Domain.POSITIVE))
        if value != value // 1:
            raise self.fail(f"must be a whole number, got {value!r}", key)
        self._within(key, value)
        return int(value)

    def switch(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, (bool,), "true or false")
        return default if value is None else bool(value)

    def mapping(self, key: str) -> JsonObject:
        """Return a table as it is; empty if missing."""
        value = self._get(key, (dict,), "a table")
        return {} if value is None else dict(value)

    def table(self, key: str) -> Table:
        """Return a sub-table; a missing one is an error."""
        value = self._need(key, self._get(key, (dict,), "a table"))
        return Table(value, (*self._path, key), self._lines, self._source, self._numbers)

    def texts(self, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return a list of texts; a single text is a list of one."""
        value = self._get(key, (list, str), "a list of strings")
        if value is None:
            return default
        found = [value] if isinstance(value, str) else value
        if not all(isinstance(each, str) for each in found):
            raise self.fail("must be a list of strings", key)
        return tuple(found)

    def names(self) -> list[str]:
        """Return all keys that are there."""
        return list(self._data)

    def tables(self, key: str, *, required: bool = True) -> list[Table]:
        """Return an array of tables."""
        value = self._get(key, (list,), "an array of tables")
        if value is None:
            if required:
                raise self.fail(f"key {key!r} is missing")
            return []
        if not all(isinstance(entry, dict) for entry in value):
            raise self.fail("must be an array of tables", key)
        return [
            Table(entry, (*self._path, key, i), self._lines, self._source, self._numbers)
            for i, entry in enumerate(value)
        ]

    def rest(self) -> JsonObject:
        """Return every key not asked for, for a reader that knows them better."""
        left = {key: value for key, value in self._data.items() if key not in self._known}
        self._known.extend(left)
        return left

    def close(self) -> None:
        """Refuse keys that were not read."""
        for key in self._data:
            if key not in self._known:
                raise self.fail(f"unknown key; known: {', '.join(dict.fromkeys(self._known))}", key)

    def build(self, make: Callable[[], T], key: str | None = None, *, other: Table | None = None) -> T:
        """Call ``make`` and pin its error on ``key``, else on the key that the text names, else on the table.

        A text names keys as SECTION.KEY, and a key of this table or of the top also by its first word. ``other`` is
        another table that it may be about.
        """
        try:
            return make()
        except ScenarioError:
            raise
        except CallerError as error:
            text = str(error)
            if key is not None and key in self._data:
                raise self.fail(text, key) from None
            known = [*_NAMED.findall(text), ("", text.split(" ", 1)[0].rstrip(":"))]
            tables = [self, *([other] if other else [])]
            paths = (path for section, word in known for path in self._places(tables, section, word, text))
            raise self.fail(text, path=next(paths, None)) from None

    def _places(self, tables: list[Table], section: str, key: str, text: str) -> Iterator[Path_]:
        """Return where the key of a section may be: in these tables, their policies, or the document."""
        keys = (key, _INSTEAD.get(key, key))
        for table in tables:
            yield from ((*table._path, each) for each in keys if each in table._data)
            for place, entry in enumerate(table._data.get("policies", ())):
                if isinstance(entry, dict) and entry.get("policy") == section:
                    yield (*table._path, "policies", place, key if key in entry else "policy")
        if section == "chips":
            yield from _pools(self._numbers.document, key, text)
        there = self._numbers.document.get(section, {}) if section else self._numbers.document
        if isinstance(there, dict):
            yield from (((section, each) if section else (each,)) for each in keys if each in there)
        elif isinstance(there, list):
            named = sorted(enumerate(there), key=lambda pair: repr(pair[1].get("name")) not in text)
            yield from ((section, place, each) for place, entry in named for each in keys if each in entry)


def read_toml(path: Path, numbers: Numbers | None = None) -> Table:
    """Read a TOML file; ``numbers`` says how uncertain ones are read, by default at their medians.

    Raises:
        ScenarioError: It cannot be read or is not TOML; the parser names the line.
    """
    try:
        text = limits.read_file(path, limits.SCENARIO_BYTES).decode("utf-8")
        data = tomllib.loads(text)
        lines = _Scan(text.replace("\r\n", "\n")).run()
    except OSError as error:
        if is_about_name(error):
            raise ScenarioError(f"cannot read {path}: {error.strerror}") from None
        raise file_error(f"cannot read {path}", error) from None
    except (EvidenceError, ValueError, RecursionError) as error:
        raise ScenarioError(f"{path.name} is not TOML: {error}") from None
    numbers = numbers or Numbers()
    numbers.document = data
    return Table(data, (), lines, path.name, numbers)


def _pools(document: JsonObject, key: str, text: str) -> Iterator[Path_]:
    """Return the place of the key of the pools of chips that the text is about, by lab and status."""
    for lab, owner in enumerate(document.get("lab", ())):
        for site, hall in enumerate(owner.get("site", ())):
            for place, pool in enumerate(hall.get("chips", ())):
                if key in pool and repr(owner.get("name")) in text and str(pool.get("status")) in text:
                    yield ("lab", lab, "site", site, "chips", place, key)


def _plain(path: Path_) -> str:
    """Return a table's path without the places in arrays."""
    return ".".join(part for part in path if isinstance(part, str))


def _dotted(path: Path_) -> str:
    words = ""
    for part in path:
        words += f"[{part + 1}]" if isinstance(part, int) else f".{part}" if words else part
    return words
