"""``program show`` and ``program review`` on recorded loops."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from analysis.cli import main
from analysis.explorer.programs import program_graphs
from inspector.inspection.trust import Trust
from tests.agreements import agreement, resigned


@pytest.fixture
def loop(record_loop):
    """Record a loop whose batches also reach a buffer, as a codebook's or a cheat's would."""

    def record(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        model.register_buffer("codes", torch.zeros(5, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def body(model, optimizer, batch):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                model.codes.lerp_(batch, 0.1)

        return record_loop(model, optimizer, [torch.randn(5, 4) for _ in range(2)], body, **options).run

    return record


def ask(capsys, *words):
    capsys.readouterr()
    code = main(["program", *map(str, words)])
    return code, capsys.readouterr()


def test_show_prints_a_page_with_compute_memory_and_paths(loop, capsys):
    run = loop()
    code, said = ask(capsys, "show", run)
    assert code == 0
    (program,) = (path.stem for path in (run / "programs").iterdir())
    lines = said.out.splitlines()
    assert lines[0] == f"program        {program}: training"
    assert lines[1].startswith("FLOP           240 in products")  # forward and the weight's gradient: 2 × 2·5·4·3
    assert "direct path    'batch:batch' reaches 'buffer/codes' by aten.lerp_.Scalar" in said.out
    assert "running stat.  'batch:batch' reaches 'buffer/1.running_mean' by aten.native_batch_norm.default" in said.out


def test_the_explorer_draws_what_reads_what(loop):
    run = loop()
    found: Any = program_graphs(run)
    (graph,) = found["programs"]
    assert (found["problem"], found["left_out"], graph["left_out"]) == (None, 0, 0)
    nodes, names = graph["nodes"], {each[1]: place for place, each in enumerate(graph["nodes"])}
    assert graph["calls"] == graph["views"] + sum(kind == "call" for kind, *_ in nodes)
    assert [names["batch:batch"], names["aten.lerp_.Scalar"]] in [list(each) for each in graph["edges"]]
    assert all(nodes[source][3] < nodes[place][3] for source, place in graph["edges"])
    assert {kind for kind, _, number, _ in nodes if number is None} <= {"batch", "state", "constant"}
    (path,) = (run / "programs").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    broken = program_graphs(run)
    assert broken["programs"] == []
    assert broken["problem"]


def test_show_of_a_file_a_digest_and_json_agree(loop, capsys):
    run = loop()
    (path,) = (run / "programs").iterdir()
    pages = [
        json.loads(ask(capsys, "show", *words, "--json")[1].out)
        for words in ((path,), (run,), (run, "--digest", path.stem[:6]))
    ]
    assert pages[0] == pages[1] == pages[2]
    assert pages[0][0]["program"] == path.stem
    assert pages[0][0]["flop"] == 240


@pytest.mark.parametrize("words", [("none",), ("RUN", "--digest", "zz"), ("EMPTY",)])
def test_show_of_what_is_not_there_is_the_callers_mistake(loop, capsys, tmp_path, words):
    run = loop() if "RUN" in words else None
    (tmp_path / "empty").mkdir()
    named = {"RUN": run, "EMPTY": tmp_path / "empty", "none": tmp_path / "none"}
    code, said = ask(capsys, "show", *(named.get(word, word) for word in words))
    assert code == 2
    assert len(said.err.splitlines()) == 1


def test_show_of_something_else_is_the_callers_mistake_too(tmp_path, capsys):
    path = tmp_path / "program.json"
    path.write_text('{"form":"chipwitness/program/2"}')
    code, said = ask(capsys, "show", path)
    assert code == 2
    assert "missing or extra keys" in said.err


def test_review_leaves_a_path_open_that_was_not_agreed(loop, capsys):
    run = loop()
    code, said = ask(capsys, "review", run, "--trust", f"{run}.trust.json", "--json")
    answer = json.loads(said.out)
    assert code == 3
    assert answer["outcome"] == "INCONCLUSIVE"
    (reason,) = answer["reasons"]
    page = answer["evidence"]["programs"][0]
    assert reason["program"] == page["program"]
    assert (reason["tensor"], reason["source"], reason["operator"]) == (
        "buffer/codes",
        "batch:batch",
        page["direct_paths"][0]["operator"],
    )
    assert "`declare countersign --direct-path 'buffer/codes'`" in reason["text"]


@pytest.mark.parametrize("by", ["tensor", "program"])
def test_review_accepts_a_path_that_was_agreed(loop, capsys, by):
    run = loop(direct_paths=["buffer/codes"] if by == "tensor" else [])
    trust = run.with_name("loop.trust.json")
    known = Trust.load([trust])
    paths = {"buffer/codes"} if by == "tensor" else set(agreement(known).programs)
    if by == "program":
        known = resigned(run, known, direct_paths=frozenset(paths))
        trust.write_text(json.dumps(known.to_json()))
    assert agreement(known).direct_paths == paths
    code, said = ask(capsys, "review", run, "--trust", trust, "--json")
    answer = json.loads(said.out)
    assert code == 0
    assert "direct paths: 1 agreed, 2 into running statistics" in answer["reasons"][0]["text"]
    page = answer["evidence"]["programs"][0]
    assert answer["evidence"]["execution"]["governed_scalars"] == {page["program"]: 4}  # the rate of each weight
    assert page["direct_paths"][0]["tensor"] == "buffer/codes"


def test_review_of_a_program_that_was_not_countersigned_does_not_open_it(loop, capsys):
    run = loop()
    trust = run.with_name("loop.trust.json")
    other = resigned(run, Trust.load([trust]), programs=["0" * 64])
    trust.write_text(json.dumps(other.to_json()))
    code, said = ask(capsys, "review", run, "--trust", trust, "--json")
    assert code == 3
    answer = json.loads(said.out)
    assert "no amendment that allows it was countersigned" in answer["reasons"][0]["text"]
    assert answer["evidence"]["programs"] == []


@pytest.mark.parametrize("paths", [{"codes"}, {"buffer/a\nb"}, {"A" * 64}])
def test_malformed_agreements_about_paths_are_refused(loop, capsys, paths):
    run = loop()
    trust = run.with_name("loop.trust.json")
    other = resigned(run, Trust.load([trust]), direct_paths=paths)
    trust.write_text(json.dumps(other.to_json()))
    code, said = ask(capsys, "review", run, "--trust", trust)
    assert code == 2
    assert "a countersigned direct path is malformed" in said.err


def test_review_of_a_presets_run_has_running_statistics_as_its_only_paths(honest, capsys, tmp_path):
    """Its program is derived; the batch norms' running statistics are its only direct paths."""
    trust = tmp_path / "trust.json"
    trust.write_text(json.dumps(honest.trust.to_json()))
    code, said = ask(capsys, "review", honest.run, "--trust", trust)
    assert code == 0
    assert "1 programs" in said.out
    assert "0 agreed, 4 into running statistics" in said.out


@pytest.fixture
def busy(record_loop):
    """A loop with a table among its constants, evaluations of which one differentiates, and a free number."""
    torch.manual_seed(0)
    model, table = nn.Linear(4, 3), torch.randn(20, 4)

    def body(model, optimizer, batch):
        optimizer.zero_grad(set_to_none=False)
        (model(batch) + model(table).mean()).square().mean().backward()
        optimizer.step()

    def evaluate(recorder, step):
        batch = torch.randn(5, 4)
        with recorder.evaluation(batch), torch.no_grad():
            model(batch)
        with recorder.evaluation(batch):
            shown = batch.clone().requires_grad_()
            torch.autograd.grad(model(shown).square().sum(), shown)

    model.weight.grad, model.bias.grad = torch.zeros(3, 4), torch.zeros(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches, agreed = [torch.randn(5, 4)] * 2, {"direct_paths": ["evaluations"]}
    return record_loop(model, optimizer, batches, body, before=evaluate, **agreed).run


def test_review_prints_a_page_for_who_decides(busy, capsys):
    code, said = ask(capsys, "review", busy, "--trust", f"{busy}.trust.json")
    assert code == 0, said.out
    for text in (
        "group 0        'dampening' 0",
        "allowed        ",
        ": training in 2 steps, ",
        "not bound      nothing",
    ):
        assert text in said.out
    assert said.out.count(": evaluation in 2 steps, ") == 2
    assert said.out.count("it only computes, and takes derivatives") == 1
    assert "  writes       2 gradient 'bias', 'weight'; 2 weight 'bias', 'weight'" in said.out
    assert "80 × float32, sha256 " in said.out
    assert "80 distinct" in said.out
    assert len(said.out.splitlines()) < 60


def test_json_has_all_of_the_page(busy, capsys):
    pages = json.loads(ask(capsys, "show", busy, "--json")[1].out)
    kinds = {page["kind"]: page for page in pages}
    assert set(kinds) == {"training", "evaluation or read"}
    (constant,) = kinds["training"]["large_constants"]
    assert (constant["elements"], constant["distinct"]) == (80, 80)
    assert constant["min"] < constant["mean"] < constant["max"]
    assert kinds["training"]["writes"] == ["gradient/bias", "gradient/weight", "weight/bias", "weight/weight"]
    assert kinds["evaluation or read"]["reads"] == ["weight/bias", "weight/weight"]
    assert sorted(page["differentiates"] for page in pages) == [False, False, True]


def test_a_constant_that_holds_infinities_is_shown(record_loop, capsys):
    """As a causal mask does."""
    torch.manual_seed(0)
    model, mask = nn.Linear(4, 3), torch.full((10, 10), float("-inf")).triu(1)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        (model(batch).square().mean() + mask.exp().mean()).backward()
        optimizer.step()

    run = record_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(5, 4)], body).run
    code, said = ask(capsys, "show", run)
    assert (code, "-inf … 0" in said.out) == (0, True), said.out
