"""Reads rules from TOML (``inspector.rules.form``), refusing every key, kind and value that it does not know."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError, file_error
from firmware_sim.evidence import canonical
from inspector.rules.form import KINDS
from inspector.rules.truth import Truth

__all__ = ["LINKS", "PER", "Expression", "Rule", "Rules", "read_rules"]

PER = ("run", "chain", "lab", "job")
LINKS = ("parent", "start", "data", "program")
"""What may make two runs parts of one job (``jobs``): one took over the other's end, or both a third one's; one starts,
from an unknown origin, with weights and buffers that the other starts with or has at a checkpoint; they train on a
sample that their preset does not have; they train by one program."""
_USUAL_LINKS = ("parent", "start")
_MOST_RULES, _MOST_DEPTH, _MOST = 256, 16, 10**300
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,80}")
_PARAMETER = re.compile(r"[a-z_][a-z0-9_]{0,31}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)

Expression = tuple[str, tuple[Any, ...]]
"""("rule", (name,)), ("not", (expression,)), or ("all" or "any", expressions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: a quantity, and the range that it has to lie in.

    Attributes:
        about: what else the kind needs: ``per`` and ``links``; ``digests`` and the name of their ``set``;
            ``parameter``; the ``test`` file, ``test_sha256``, and perhaps the ``program`` that scores it.
    """

    name: str
    kind: str
    at_least: Fraction | None
    at_most: Fraction | None
    about: Mapping[str, Any]

    def holds(self, value: int | float | Fraction) -> bool:
        """Tell whether a value lies in the range."""
        return self.judge(value, value) is Truth.PASS

    def judge(self, least: int | float | Fraction, most: int | float | Fraction | None) -> Truth:
        """Whether a value lies in the range of which only bounds are known; ``most`` is None where it has no bound."""
        low, high = self.at_least, self.at_most
        if (high is not None and least > high) or (low is not None and most is not None and most < low):
            return Truth.FAIL
        fits = (low is None or least >= low) and (high is None or (most is not None and most <= high))
        return Truth.PASS if fits else Truth.UNDECIDED

    @property
    def range(self) -> str:
        """The range in words."""
        parts = [("at least", self.at_least), ("at most", self.at_most)]
        return " and ".join(f"{words} {_spoken(limit)}" for words, limit in parts if limit is not None)

    def to_json(self) -> dict[str, object]:
        """JSON-able values; of long lists and files their digest."""
        about = {key: value for key, value in self.about.items() if key not in ("digests", "test")}
        limits_ = {"at_least": self.at_least, "at_most": self.at_most}
        shown = {key: _number(value) for key, value in limits_.items() if value is not None}
        return {"name": self.name, "kind": self.kind, **about, **shown}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rule:
        """What ``to_json`` returned, without digests and files; KeyError, ValueError or TypeError on another form."""
        least, most = (None if data.get(key) is None else _parsed(data[key]) for key in ("at_least", "at_most"))
        about = {key: value for key, value in data.items() if key not in ("name", "kind", "at_least", "at_most")}
        if data["kind"] not in KINDS:
            raise ValueError("a rule is of no known kind")
        return cls(name=data["name"], kind=data["kind"], at_least=least, at_most=most, about=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules, and which of them are required in what combination.

    Attributes:
        digest: SHA-256, in hex, of what decides them.
    """

    rules: Mapping[str, Rule]
    require: Expression

    def of_kind(self, kind: str) -> list[Rule]:
        """The rules of a kind."""
        return [each for each in self.rules.values() if each.kind == kind]

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of everything that decides them."""
        return hashlib.sha256(canonical.encode(self.to_json())).hexdigest()

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        return {"rules": [each.to_json() for each in self.rules.values()], "require": _expression_json(self.require)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rules:
        """What ``to_json`` returned; CallerError, KeyError, ValueError or TypeError on another form."""
        rules = [Rule.from_json(each) for each in data["rules"]]
        return cls(rules={each.name: each for each in rules}, require=_expression(data["require"], 0))


def digests_name(digests: tuple[str, ...]) -> str:
    """The name of a set of digests: SHA-256, in hex, over all of them."""
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def test_name(rule: Rule) -> str:
    """The name of what a rule of kind score asks: the SHA-256 of its test set, and the program that it names."""
    return "/".join([rule.about["test_sha256"], *([rule.about["program"]] if "program" in rule.about else [])])


def read_rules(path: Path) -> Rules:
    """Parse a file of rules; CallerError of one line on anything missing, unknown or out of range."""
    try:
        text = limits.read_file(path, limits.SCENARIO_BYTES).decode()
        data = tomllib.loads(text)
    except OSError as error:
        raise file_error(f"cannot read the rules {path}", error) from None
    except (EvidenceError, ValueError, RecursionError) as error:
        raise CallerError(f"the rules {path} are not TOML that can be read: {error}") from None
    try:
        _only(data, {"rule", "require"}, "the file")
        entries = data.get("rule", [])
        if not isinstance(entries, list) or not 1 <= len(entries) <= _MOST_RULES:
            raise CallerError(f"a file of rules must have 1 … {_MOST_RULES} [[rule]] tables")
        found = [_rule(entry, path.parent) for entry in entries]
        rules = {each.name: each for each in found}
        if len(rules) < len(found):
            raise CallerError("two rules have the same name")
        require = _expression(data.get("require", {"all": list(rules)}), 0)
        named = set(_names(require))
        if named - set(rules):
            raise CallerError(f"require names {min(named - set(rules))!a:.100}, but there is no rule of that name")
        if set(rules) - named:
            raise CallerError(f"rule {min(set(rules) - named)!a:.100} is not used in require")
    except CallerError as error:
        raise CallerError(f"{path}: {error}") from None
    return Rules(rules=rules, require=require)


def _rule(entry: object, folder: Path) -> Rule:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not _NAME.fullmatch(entry["name"]):
        raise CallerError("a rule needs a name of 1 to 80 characters")
    name, kind = entry["name"], entry.get("kind")
    what = f"rule {name!a:.100}"
    if not isinstance(kind, str) or kind not in KINDS:
        raise CallerError(f"{what}: kind must be one of {', '.join(KINDS)}")
    _only(entry, {"name", "kind", "at_least", "at_most"} | KINDS[kind], what)
    least, most = (_limit(entry[key], f"{what}: {key}") if key in entry else None for key in ("at_least", "at_most"))
    if least is None and most is None:
        raise CallerError(f"{what} says neither at_least nor at_most")
    if least is not None and most is not None and least > most:
        raise CallerError(f"{what}: no value is both at least {_spoken(least)} and at most {_spoken(most)}")
    return Rule(name=name, kind=kind, at_least=least, at_most=most, about=_about(entry, kind, what, folder))


def _about(entry: Mapping[str, Any], kind: str, what: str, folder: Path) -> dict[str, object]:
    """What a rule is about, by the keys of its kind; CallerError if the entry does not say it."""
    keys, about = KINDS[kind], dict[str, object]()
    if "per" in keys:
        about |= _about_flop(entry, what)
    if "digests" in keys:
        digests = _digests(entry.get("digests"), what, folder)
        about |= {"digests": digests, "set": digests_name(digests)}
    if "parameter" in keys:
        parameter = entry.get("parameter")
        if not isinstance(parameter, str) or not _PARAMETER.fullmatch(parameter):
            raise CallerError(f"{what}: parameter must be the name of a hyper-parameter, such as lr")
        about["parameter"] = parameter
    return about | (_about_score(entry, what, folder) if "test" in keys else {})


def _about_flop(entry: Mapping[str, Any], what: str) -> dict[str, object]:
    per, links = entry.get("per"), entry.get("links", list(_USUAL_LINKS))
    if per not in PER:
        raise CallerError(f"{what}: the key 'per' must be one of {', '.join(PER)}")
    if "links" in entry and per != "job":
        raise CallerError(f"{what}: links need per = job, but per is {per}")
    if not isinstance(links, list) or not links or not set(map(str, links)) <= set(LINKS):
        raise CallerError(f"{what}: links must be some of {', '.join(LINKS)}")
    return {"per": per, **({"links": sorted(set(links))} if per == "job" else {})}


def _about_score(entry: Mapping[str, Any], what: str, folder: Path) -> dict[str, object]:
    test, program = entry.get("test"), entry.get("program")
    if not isinstance(test, str):
        raise CallerError(f"{what}: test must be the name of a safetensors file")
    about = {"test": folder / test, "test_sha256": hashlib.sha256(_content(folder / test, what)).hexdigest()}
    if program is not None and not (isinstance(program, str) and _DIGEST.fullmatch(program)):
        raise CallerError(f"{what}: program must be a digest of 64 hex digits, as `declare show` prints it")
    return about if program is None else {**about, "program": program}


def _digests(found: object, what: str, folder: Path) -> tuple[str, ...]:
    if isinstance(found, str):
        found = _content(folder / found, what).decode(errors="replace").split()
    if not isinstance(found, list) or not found:
        raise CallerError(f"{what}: digests must be a list, or the name of a file, with at least one digest")
    odd = [each for each in found if not isinstance(each, str) or not _DIGEST.fullmatch(each)]
    if odd:
        raise CallerError(f"{what}: {odd[0]!a:.80} is not a digest of 64 hex digits")
    return tuple(sorted(set(found)))


def _content(path: Path, what: str) -> bytes:
    try:
        return limits.read_file(path, limits.SAMPLES_BYTES)
    except OSError as error:
        raise file_error(f"{what}: cannot read {str(path)!a}", error) from None
    except (EvidenceError, ValueError) as error:  # the name may hold a NUL
        raise CallerError(f"{what}: {str(path)!a}: {error}") from None


def _limit(value: object, what: str) -> Fraction:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST:
        return Fraction(value)
    raise CallerError(f"{what} must be a finite number between -1e300 and 1e300")


def _expression(data: object, depth: int) -> Expression:
    if isinstance(data, str):
        return ("rule", (data,))
    if depth > _MOST_DEPTH:
        raise CallerError(f"require is nested more than {_MOST_DEPTH} deep")
    if not isinstance(data, dict) or len(data) != 1 or not set(data) <= {"all", "any", "not"}:
        raise CallerError(
            "require, and each of its parts, must be the name of a rule or a table with one of the keys all, any, not"
        )
    [(word, parts)] = data.items()
    if word == "not":
        return (word, (_expression(parts, depth + 1),))
    if not isinstance(parts, list) or not parts:
        raise CallerError(f"{word} takes a list of at least one part")
    return (word, tuple(_expression(part, depth + 1) for part in parts))


def _names(expression: Expression) -> Iterator[str]:
    word, parts = expression
    for part in parts:
        if word == "rule":
            yield part
        else:
            yield from _names(part)


def _expression_json(expression: Expression) -> Any:
    word, parts = expression
    if word == "rule":
        return parts[0]
    return {word: _expression_json(parts[0]) if word == "not" else [_expression_json(part) for part in parts]}


def _only(data: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(set(data) - known)
    if unknown:
        raise CallerError(f"{what} has an unknown key {unknown[0]!a:.60}; known: {', '.join(sorted(known))}")


def _parsed(text: str) -> Fraction:
    return Fraction(int(text) if text.lstrip("-").isdigit() else float(text))


def _spoken(value: Fraction) -> str:
    """A number for people: 1e+25 where its digits say no more."""
    exact = value.denominator == 1 and (abs(value) < 10**15 or Fraction(float(value)) != value)
    return str(value.numerator) if exact else repr(float(value))


def _number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else repr(float(value))
