"""Whose runs a rule on compute adds up: of a lab, its own and those that it is known to continue, and never more.

A rival can start from anybody's model, data or program. So a link by itself accuses no one: it only leaves open how
large a job is. A lab answers for its own runs, and for those from which they took over what its declarations say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inspector.inspection.document import LineageEvidence
from inspector.inspection.lineage import chain_of
from inspector.inspection.transcripts import Transcript
from inspector.rules.rule_files import Rule
from inspector.rules.truth import Truth
from monitor.presets import preset
from monitor.replay.steps import execution_of
from monitor.transcript.data import RunData, sample_digest

__all__ = ["Group", "groups_of", "id_of"]

_NAMED = 4
"""Runs that a text names."""
_MODEL = "model "


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that are added up.

    Attributes:
        lab: who answers for them.
        what: in words, with what other labs' runs have to do with them.
        items: its own runs, and what they continue.
        wide: those, and what else may belong to them.
    """

    lab: str
    what: str
    items: Sequence[Transcript]
    wide: Sequence[Transcript]


def id_of(item: Transcript) -> str:
    """The run's id."""
    return item.run.manifest.run


def groups_of(
    rule: Rule,
    transcripts: Sequence[Transcript],
    lineages: Sequence[LineageEvidence],
    flop: Mapping[str, int],
) -> Iterator[Group]:
    """What a rule of kind flop bounds, each with the lab that answers for it.

    Args:
        lineages: ``lineage.examine_lineages``.
        flop: what each run declares, by its id.
    """
    known, per = {id_of(item): item for item in transcripts}, rule.about["per"]
    parents = {str(line["run_id"]): known[line["parent"]] for line in lineages if line["parent"] is not None}
    chains = {run: chain_of(item, parents) for run, item in known.items()}
    if per == "job":
        explained = {str(line["run_id"]) for line in lineages if line["parent"] or line["past_unknown"] is None}
        yield from _Links(transcripts, chains, explained, rule.about["links"]).jobs(rule, flop)
    elif per == "lab":
        for lab, mine in _by_lab(transcripts).items():
            yield Group(lab=lab, what=f"lab {lab}", items=mine, wide=mine)
    else:
        for item in transcripts:
            items, lab = chains[id_of(item)] if per == "chain" else [item], item.run.metadata.lab
            what = ("the chain " if per == "chain" else "run ") + " → ".join(each.run.name for each in items)
            yield Group(lab=lab, what=what + _continued(items, lab), items=items, wide=items)


class _Links:
    """What joins runs to jobs (``reading.LINKS``).

    Args:
        chains: by its id, each run after those that it continues.
        explained: ids of the runs whose start is known to come from a parent or a public seed.
    """

    def __init__(
        self,
        transcripts: Sequence[Transcript],
        chains: Mapping[str, Sequence[Transcript]],
        explained: set[str],
        links: Sequence[str],
    ) -> None:
        self._transcripts, self._chains, self._explained = transcripts, chains, explained
        self._unknown: set[str] = set()
        self._marks: dict[str, set[str]] = {}
        public: dict[str, set[bytes]] = {}
        for item in transcripts:
            found = {id_of(each) for each in (chains[id_of(item)] if {"parent", "start"} & set(links) else [item])}
            if "start" in links:
                found |= {f"{_MODEL}{each}" for each in self._models(item)}
            if "program" in links:
                found |= {f"program {execution_of(leaf).program}" for leaf in item.leaves[1:] if leaf.trains}
            if "data" in links and item.run.declared.recipe is not None and isinstance(item.data, RunData):
                name = item.run.task.preset
                public[name] = public.get(name) or _rows(preset(name).samples(None))
                found |= {f"sample {row.hex()}" for row in _rows(item.data.samples) - public[name]}
            elif "data" in links:
                self._unknown.add(id_of(item))
            self._marks[id_of(item)] = found

    def _start(self, item: Transcript) -> str | None:
        """The model from which a run starts, if its origin is unknown."""
        return None if id_of(item) in self._explained else item.models.get(0)

    def _models(self, item: Transcript) -> set[str]:
        """The models that a run passes through, but for a start that anybody can make, or that is another's end."""
        return {model for step, model in item.models.items() if step or id_of(item) not in self._explained}

    def jobs(self, rule: Rule, flop: Mapping[str, int]) -> Iterator[Group]:
        """Each lab's jobs: its own runs that links join, with what these continue.

        Others that links join to them may belong to the same, but for those that start from what its runs give, and
        those of labs that break the rule alone.
        """
        owned: list[tuple[str, set[str], list[Transcript]]] = []
        for lab, mine in _by_lab(self._transcripts).items():
            for joined in self._joined(mine):
                runs = set(map(id_of, joined))
                held = {each for run in runs for each in self._marks[run]}
                owned.append((lab, runs, [item for item in self._transcripts if id_of(item) in held]))
        broken: set[str] = set()
        for _, runs, job in owned:
            broken |= runs if rule.judge(sum(flop[id_of(item)] for item in job), None) is Truth.FAIL else set()
        for lab, runs, job in owned:
            held, mine = set(map(id_of, job)), [item for item in job if id_of(item) in runs]
            given = {each for item in mine for each in self._models(item)} - {self._start(item) for item in mine}
            apart = {
                run
                for run, chain in self._chains.items()
                if run in broken
                or not runs.isdisjoint(map(id_of, chain))
                or any(self._start(each) in given for each in chain)
            } - held
            wide = self._around(held, [item for item in self._transcripts if id_of(item) not in apart])
            shared = {each for run in held for each in self._marks[run]}
            alone = [x for x in self._transcripts if id_of(x) in apart and not shared.isdisjoint(self._marks[id_of(x)])]
            others = [item for item in wide if id_of(item) not in held]
            why = f", since the data of {len(self._unknown)} runs are unknown" if self._unknown else ""
            what = f"the job of {len(job)} runs of {len(_by_lab(job))} labs{_continued(job, lab)}"
            what += f" ({_names(others)} may belong to it{why})" if others else ""
            what += f" ({_names(alone)} may not: what starts from it, or exceeds alone)" if alone else ""
            yield Group(lab=lab, what=what, items=job, wide=wide)

    def _around(self, job: set[str], items: Sequence[Transcript]) -> list[Transcript]:
        """Those of some runs that may belong to a job: all, where anybody's links are not known."""
        if not self._unknown.isdisjoint(map(id_of, items)):
            return list(items)
        return next(each for each in self._joined(items, job) if not job.isdisjoint(map(id_of, each)))

    def _joined(self, items: Sequence[Transcript], job: Collection[str] = ()) -> list[list[Transcript]]:
        """Runs put together where a link joins them, however far apart, and those of a job.

        Runs that hold one model are joined by one of them that starts with it, and by no other run.
        """
        starts = {f"{_MODEL}{self._start(item)}" for item in items}
        groups: list[tuple[set[str], list[Transcript]]] = []
        for item in items:
            marks = {each for each in self._marks[id_of(item)] if _joins(each, starts)}
            shared, together, apart = marks | ({"job"} if id_of(item) in job else set()), [item], []
            for others, members in groups:
                if shared & others:
                    shared, together = shared | others, members + together
                else:
                    apart.append((others, members))
            groups = [*apart, (shared, together)]
        return [members for _, members in groups]


def _by_lab(transcripts: Sequence[Transcript]) -> dict[str, list[Transcript]]:
    labs = sorted({item.run.metadata.lab for item in transcripts})
    return {lab: [item for item in transcripts if item.run.metadata.lab == lab] for lab in labs}


def _joins(mark: str, starts: set[str]) -> bool:
    return mark in starts or not mark.startswith(_MODEL)


def _rows(samples: Mapping[str, np.ndarray]) -> set[bytes]:
    """Digests of samples."""
    count = len(next(iter(samples.values())))
    return {sample_digest(b"", {name: values[row] for name, values in samples.items()}) for row in range(count)}


def _continued(items: Sequence[Transcript], lab: str) -> str:
    others = [item for item in items if item.run.metadata.lab != lab]
    return f", with {_names(others)} that only gave models," if others else ""


def _names(items: Sequence[Transcript]) -> str:
    """Runs with their labs, in words."""
    named = ", ".join(f"{item.run.name} of {item.run.metadata.lab}" for item in items[:_NAMED])
    return named + (f" and {len(items) - _NAMED} more" if len(items) > _NAMED else "")
