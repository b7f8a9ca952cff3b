"""Whose runs a rule on compute adds up: of a lab, its own and those that it is known to continue, and never more.

A rival can start from anybody's model, data or program. So a link by itself accuses nobody: it only leaves open how
large a job is. A lab answers for its own runs, and for those from which they took over what its declarations say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from inspector.inspection.lineage import chain_of
from inspector.inspection.transcripts import Transcript
from inspector.rules.reading import Rule
from monitor.presets import preset
from monitor.replay.steps import execution_of
from monitor.transcript.data import RunData, sample_digest

__all__ = ["Group", "groups_of", "id_of", "jobs_of"]

_NAMED = 4
"""Runs that a text names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that are added up.

    Attributes:
        lab: who answers for them.
        what: in words.
        items: its own runs, and what they continue.
        wide: those, and what else may belong to them.
        told: of other labs' runs, in words.
    """

    lab: str
    what: str
    items: Sequence[Transcript]
    wide: Sequence[Transcript]
    told: str = ""


def id_of(item: Transcript) -> str:
    """The run's id."""
    return item.run.manifest.run


def groups_of(
    rule: Rule,
    transcripts: Sequence[Transcript],
    lineages: Sequence[Mapping[str, str | None]],
    flop: Mapping[str, int],
) -> Iterator[Group]:
    """What a rule of kind flop bounds, each with the lab that answers for it.

    Args:
        lineages: ``lineage.examine_lineages``.
        flop: what each run declares, by its id.
    """
    known = {id_of(item): item for item in transcripts}
    parents = {str(line["run_id"]): known[line["parent"]] for line in lineages if line["parent"] is not None}
    per = rule.about["per"]
    if per == "job":
        explained = {str(line["run_id"]) for line in lineages if line["parent"] or line["past_unknown"] is None}
        yield from jobs_of(rule, _Links(transcripts, parents, explained, set(rule.about["links"])), flop)
    elif per == "lab":
        for lab, mine in _by_lab(transcripts).items():
            yield Group(lab=lab, what=f"lab {lab}", items=mine, wide=mine)
    else:
        for item in transcripts:
            chain = chain_of(item, parents) if per == "chain" else [item]
            what = ("the chain " if per == "chain" else "run ") + " → ".join(each.run.name for each in chain)
            lab = item.run.metadata.lab
            yield Group(lab=lab, what=what, items=chain, wide=chain, told=_continued(chain, lab))


def _by_lab(transcripts: Sequence[Transcript]) -> dict[str, list[Transcript]]:
    labs = sorted({item.run.metadata.lab for item in transcripts})
    return {lab: [item for item in transcripts if item.run.metadata.lab == lab] for lab in labs}


@dataclass
class _Links:
    """What joins runs (``reading.LINKS``).

    Attributes:
        parents: by a run's id, the one from which it took over what it declares to.
        explained: ids of the runs whose start is known to come from a parent or a public seed.
    """

    transcripts: Sequence[Transcript]
    parents: Mapping[str, Transcript]
    explained: set[str]
    links: set[str]
    _public: dict[str, set[bytes]] = field(default_factory=dict)

    def models(self, item: Transcript) -> set[str]:
        """The models that the run passes through, but for a start that anybody can make, or that is another's end."""
        return {model for step, model in item.models.items() if step or id_of(item) not in self.explained}

    def start(self, item: Transcript) -> str | None:
        """The model from which a run starts of which nobody knows where it comes from."""
        return None if id_of(item) in self.explained else item.models.get(0)

    def follows(self, item: Transcript, runs: set[str], models: set[str]) -> bool:
        """Whether a run starts from what one of these runs gives."""
        before = {id_of(each) for each in chain_of(item, self.parents)}
        return bool(before & runs) or self.start(item) in models

    def parenthood(self, item: Transcript) -> set[str]:
        """The run and its parent."""
        both = chain_of(item, self.parents)[-2:] if self.links & {"parent", "start"} else [item]
        return {f"run {id_of(each)}" for each in both}

    @cached_property
    def marks(self) -> dict[str, set[str]]:
        """By its id, what each run shares with others of its job."""
        starts = {self.start(item) for item in self.transcripts} if "start" in self.links else set()
        found = {}
        for item in self.transcripts:
            shared = self.parenthood(item) | {f"model {model}" for model in self.models(item) & starts}
            if "data" in self.links:
                shared |= {f"sample {each.hex()}" for each in self._samples(item) or ()}
            if "program" in self.links:
                shared |= {f"program {execution_of(leaf).program}" for leaf in item.leaves[1:] if leaf.trains}
            found[id_of(item)] = shared
        return found

    @cached_property
    def unknown(self) -> set[str]:
        """The ids of the runs whose links nobody knows."""
        return {id_of(item) for item in self.transcripts if "data" in self.links and self._samples(item) is None}

    def _samples(self, item: Transcript) -> set[bytes] | None:
        """Digests of a run's samples that its preset does not have; None where nobody can tell samples apart here."""
        if item.run.declared.recipe is None or not isinstance(item.data, RunData):
            return None
        name = item.run.task.preset
        if name not in self._public:
            self._public[name] = _rows(preset(name).samples(None))
        return _rows(item.data.samples) - self._public[name]

    def joined(self, items: Sequence[Transcript], marks: Mapping[str, set[str]]) -> list[list[Transcript]]:
        """Runs put together where a mark joins them, however far apart."""
        groups: list[tuple[set[str], list[Transcript]]] = []
        for item in items:
            shared, together, apart = marks[id_of(item)], [item], []
            for others, members in groups:
                if shared & others:
                    shared, together = shared | others, members + together
                else:
                    apart.append((others, members))
            groups = [*apart, (shared, together)]
        return [members for _, members in groups]

    def around(self, job: set[str], items: Sequence[Transcript]) -> list[Transcript]:
        """Those of some runs that may belong to a job: all, where anybody's links are not known."""
        if not self.unknown.isdisjoint(map(id_of, items)):
            return list(items)
        marks = {run: shared | ({"job"} if run in job else set()) for run, shared in self.marks.items()}
        return next(each for each in self.joined(items, marks) if not job.isdisjoint(map(id_of, each)))


def jobs_of(rule: Rule, links: _Links, flop: Mapping[str, int]) -> Iterator[Group]:
    """Each lab's jobs: its own runs that links join, with what these continue.

    Others that links join to them may belong to the same, but for those that start from what its runs give, and those
    of labs that break the rule alone.
    """
    owned: list[tuple[str, set[str], list[Transcript]]] = []
    for lab, mine in _by_lab(links.transcripts).items():
        own = {id_of(item): links.marks[id_of(item)] for item in mine}
        past = [each for item in mine for each in chain_of(item, links.parents)]
        marks = {id_of(item): links.parenthood(item) for item in past} | own
        for items in links.joined([item for item in links.transcripts if id_of(item) in marks], marks):
            runs = own.keys() & set(map(id_of, items))
            owned += [(lab, runs, items)] if runs else []
    most = rule.at_most
    broken = {
        run
        for _, runs, items in owned
        if most is not None and sum(flop[id_of(each)] for each in items) > most
        for run in runs
    }
    for lab, runs, items in owned:
        job = set(map(id_of, items))
        models = {model for item in items if id_of(item) in runs for model in links.models(item)}
        models -= {links.start(item) for item in items}
        rest = [
            item
            for item in links.transcripts
            if id_of(item) in job or not (id_of(item) in broken or links.follows(item, runs, models))
        ]
        wide = links.around(job, rest)
        left = set(map(id_of, rest))
        alone = [item for item in links.around(job, links.transcripts) if id_of(item) not in left]
        others = [item for item in wide if id_of(item) not in job]
        told = _continued(items, lab)
        told += f"; {_names(others)} may belong to it, by what they share or because nobody knows" if others else ""
        told += f"; {_names(alone)} start from it or are too large alone, and concern their own labs" if alone else ""
        labs = len({item.run.metadata.lab for item in items})
        what = f"the job of {len(items)} runs of {labs} labs"
        yield Group(lab=lab, what=what, items=items, wide=wide, told=told)


def _rows(samples: Mapping[str, np.ndarray]) -> set[bytes]:
    """Digests of samples."""
    count = len(next(iter(samples.values())))
    return {sample_digest(b"", {name: values[row] for name, values in samples.items()}) for row in range(count)}


def _continued(items: Sequence[Transcript], lab: str) -> str:
    others = [item for item in items if item.run.metadata.lab != lab]
    return f", {_names(others)} included, which it only continues" if others else ""


def _names(items: Sequence[Transcript]) -> str:
    """Runs with their labs, in words."""
    named = ", ".join(f"{item.run.name} of {item.run.metadata.lab}" for item in items[:_NAMED])
    return named + (f" and {len(items) - _NAMED} more" if len(items) > _NAMED else "")
