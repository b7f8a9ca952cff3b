"""Bundles of an honest and a lying lab, made once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from firmware_sim.evidence import SigningKey
from inspector.bundle.builder import bundle_of
from inspector.bundle.replays import signing
from inspector.inspection.casefile import CaseFile
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.sources import Past
from inspector.probability.odds import Violation

INSPECTORATE = SigningKey.generate(b"i" * 32)
CLUSTER = SigningKey.generate(b"c" * 32)
SETTINGS = Settings(
    samples=2,
    seed="x",
    devices=("sse41",),
    sampling=Sampling(confidence=0.5, against=Violation.parse("swap")),
)


@dataclass(frozen=True)
class Made:
    """A bundle, with what is needed to check it or to make another."""

    data: bytes
    trust: Any
    case: CaseFile
    verdict: Any


def known(trust):
    """The trust file of somebody who knows the inspectorate's and the cluster's keys."""
    return replace(
        trust,
        inspectorates=trust.inspectorates | {INSPECTORATE.verifying},
        clusters=frozenset({CLUSTER.verifying}),
    )


def made(recorded, devices, *, settings=SETTINGS, earlier=(), cluster=CLUSTER, runs=None) -> Made:
    """Inspect, and make a bundle of the verdict."""
    case = CaseFile()
    verdict = inspect(
        runs or [recorded.run],
        recorded.trust,
        settings,
        now=recorded.now,
        worker=signing(devices.run, cluster),
        past=Past(heads=earlier),
        case=case,
    )
    data = bundle_of(case, verdict, recorded.trust, settings, INSPECTORATE)
    return Made(data, known(recorded.trust), case, verdict)


@pytest.fixture(scope="session")
def accepted(tmp_path_factory, record, devices) -> Made:
    """The bundle of an honest run, whose folder is gone."""
    return made(record(tmp_path_factory.mktemp("bundle") / "run"), devices)


@pytest.fixture(scope="session")
def rejected(tmp_path_factory, record, devices) -> Made:
    """The bundle of a run with a wrong operator in its first segment."""
    recorded = record(tmp_path_factory.mktemp("bundle") / "run", lie="wrong-operator", lie_step=2, numerics="exact")
    return made(recorded, devices)
