"""``check``: all that cannot be recorded of a loop, each with its line and what to write instead."""

from __future__ import annotations

import json
import textwrap

import pytest

from analysis.cli import main
from firmware_sim.errors import CallerError

HEAD = """
    import torch
    from torch import nn
    from monitor import Recorder

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recorder = Recorder(model, optimizer, out="RUN")
    average = torch.zeros(())
"""
CLEAN = """
    for number in range(100):
        x, y = torch.randn(12, 8), torch.randint(0, 4, (12,))
        with recorder.step((x, y)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
"""
PLANTED = """
    for number in range(100):
        x, y = torch.randn(12, 8), torch.randint(0, 4, (12,))
        with recorder.step((x, y)):
            optimizer.zero_grad()
            spread = torch.special.bessel_j0(model[0](x))  # operator
            loss = nn.functional.cross_entropy(model(x), y) + spread.sum()
            average = 0.9 * average + loss.detach()  # state
            loss = loss * average
            loss = loss * (1.0 + 0.5 * number)  # number
            loss = loss + torch.tensor(float(number))  # literal
            model[0].bias.detach().numpy()[0] += 0.25
            loss.backward()
            optimizer.step()  # hidden write
        optimizer.param_groups[0]["momentum"] = 0.95
        with torch.no_grad():
            model[2].bias.mul_(0.5)
    recorder.finish()
"""
EXPECTED = {
    "operator": ("aten.special_bessel_j0.default is not supported", "compute it before the step"),
    "number": ("a number that aten.mul.Tensor takes changes", "pass it as a tensor of the batch"),
    "hidden write": ("weight/0.bias was written in step 1", "write it inside of a step"),
}


def check(tmp_path, capsys, monkeypatch, text, *words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(textwrap.dedent(text))
    code = main(["check", *(words or ("loop.py",)), "--json"])
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if shown.out else shown.err


def test_refusals_planted_in_one_loop_come_from_one_check_with_line_and_remedy(tmp_path, capsys, monkeypatch):
    code, found = check(tmp_path, capsys, monkeypatch, HEAD + PLANTED)
    assert code == 1
    refusals = found["refusals"]
    for mark, (cause, remedy) in EXPECTED.items():
        ours = [each for each in refusals if cause in each["cause"]]
        assert ours, (mark, refusals)
        assert ours[0]["remedy"].startswith(remedy)
        assert f"# {mark}" in ours[0]["code"]
    causes = " | ".join(each["cause"] for each in refusals)
    assert "momentum is 0.95 in this step, but was declared as 0.9" in causes
    assert "writes 'weight/2.bias' outside the optimizer's updates" in causes
    assert all(each["remedy"] for each in refusals)
    operator = next(each for each in refusals if each["operator"] == "aten.special_bessel_j0.default")
    assert operator["shapes"] == ["float32[12, 16]"]
    keys = [(each["line"], each["operator"] or each["cause"]) for each in refusals]
    assert len(set(keys)) == len(keys)
    assert (found["steps"], found["recorders"]) == (3, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["loop.py"]  # nothing was written


def test_refused_backward_names_the_line_of_the_forward_pass(tmp_path, capsys, monkeypatch):
    rows = "nn.functional.embedding(y, model[2].weight, sparse=True)[:, :4]"
    body = CLEAN.replace("model(x), y)", f"model(x) + {rows}, y)")
    code, found = check(tmp_path, capsys, monkeypatch, HEAD + body)
    assert code == 1
    assert {"sparse=True" in each["code"] for each in found["refusals"]} == {True}


def test_clean_loop_ends_after_a_few_steps_with_nothing_refused(tmp_path, capsys, monkeypatch):
    code, found = check(tmp_path, capsys, monkeypatch, HEAD + CLEAN, "loop.py", "--steps", "2")
    assert (code, found["refusals"], found["steps"], found["programs"]) == (0, [], 2, 2)
    [table] = found["tables"]
    counted = {"weight": 4, "gradient": 4, "optimizer": 4, "step": 2, "evaluation": 0, "write": 0, "program": 2}
    assert table["recorded"] == counted
    assert {"lr", "momentum", "weight_decay"} <= set(table["bound"])
    assert (table["unbound"], table["refused"], table["seed"]) == ({}, 0, 0)
    assert table["cost"]["ratio"] == pytest.approx(
        (table["cost"]["controlled"] + table["cost"]["digest"]) / table["cost"]["native"]
    )
    code, found = check(
        tmp_path, capsys, monkeypatch, "def loop():" + textwrap.indent(HEAD + CLEAN, "    "), "loop:loop"
    )
    assert (code, found["refusals"]) == (0, [])


def test_table_names_what_nothing_is_bound_to(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (HEAD + CLEAN).replace("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", OWN)
    (tmp_path / "loop.py").write_text(textwrap.dedent(text))
    main(["check", "loop.py"])
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:6])
    assert list(shown) == ["recorded", "bound", "unbound", "refused", "random", "cost"]
    assert shown["bound"] == "nothing"
    names, _, reason = shown["unbound"].partition(": ")
    assert names == "dampening, lr, maximize, momentum, nesterov, weight_decay"
    assert reason.endswith("is not known here")
    assert "come from the recorder's seed, which is 0" in shown["random"]


OWN = "type('Own', (torch.optim.SGD,), {'__doc__': 'like another'})(model.parameters(), lr=0.1, momentum=0.9)"


def test_object_that_cannot_be_recorded_hides_no_refusal_of_its_steps(tmp_path, capsys, monkeypatch):
    text = (HEAD + PLANTED).replace("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", OTHER)
    code, found = check(tmp_path, capsys, monkeypatch, text)
    assert code == 1
    causes = " | ".join(each["cause"] for each in found["refusals"])
    assert "SparseAdam takes sparse gradients" in causes
    assert "aten.special_bessel_j0.default is not supported" in causes


OTHER = "torch.optim.SparseAdam(model.parameters(), lr=0.1)"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("x = 1", (), "makes no monitor.Recorder, so there is nothing to say"),
        (HEAD, (), "takes no step of its monitor.Recorder"),
        (HEAD + "\n    1 / 0", (), "ended with ZeroDivisionError: division by zero"),
        ("", ("absent.py",), "there is no file absent.py"),
        ("", ("loop",), "is neither a FILE.py nor a MODULE:FUNCTION"),
        ("", ("loop:absent",), "loop:absent cannot be found"),
    ],
)
def test_code_that_says_nothing_is_the_callers_mistake(tmp_path, capsys, monkeypatch, text, words, message):
    code, shown = check(tmp_path, capsys, monkeypatch, text, *words)
    assert code == 2
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_dry_run_of_ones_own_raises_all_refusals_at_its_end(tmp_path):
    import torch

    from monitor import Recorder

    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", dry_run=True)
    for number in range(2):
        with recorder.step(torch.ones(2, 8)):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).sum() * (number + 0.5)
            (loss + torch.special.bessel_j0(model.weight).sum()).backward()
            optimizer.step()
    assert recorder.steps == 2
    assert {each.step for each in recorder.refusals} == {1, 2}
    with pytest.raises(CallerError, match=r"refusals: .*aten\.special_bessel_j0.* \| .*changes from step to step"):
        recorder.finish()
    assert list(tmp_path.iterdir()) == []
