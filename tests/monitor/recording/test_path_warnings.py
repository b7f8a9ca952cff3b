"""What a recorder warns of at the first step of each program; each way out that it names ends without a warning."""

from __future__ import annotations

import ast
import re
import warnings

import pytest
import torch
from torch import nn

from firmware_sim.errors import CallerError
from monitor import Recorder


def seeded(model, batch, optimizer, *, mended):
    out = model(batch["x"])
    if mended:
        (out * batch["weights"]).sum().backward()
    else:
        out.backward(batch["weights"])
    optimizer.step()


def by_hand(model, batch, optimizer, *, mended):
    model(batch["x"]).square().mean().backward()
    if mended:
        optimizer.step()
    else:
        with torch.no_grad():
            model.weight.sub_(model.weight.grad, alpha=0.1)


def into_a_buffer(model, batch, optimizer, *, mended):
    model(batch["x"]).square().mean().backward()
    with torch.no_grad():
        model.codes.copy_(batch["x"].repeat(3, 1))
    optimizer.step()


def through_a_gradient(model, batch, optimizer, *, mended):
    model(batch["x"]).square().mean().backward()
    with torch.no_grad():
        model.codes.copy_(model.weight.grad.repeat(2, 1))
    optimizer.step()


def of_many(model, batch, optimizer, *, mended):
    model(batch["x"]).square().mean().backward()
    with torch.no_grad():
        for each in model.many:
            each.copy_(batch["x"].repeat(3, 1))
    optimizer.step()


def recorded(body, folder, *, mended=False, **options):
    """The warnings of three steps."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3, bias=False)
    model.register_buffer("codes", torch.zeros(6, 6))
    many = [torch.zeros(6, 6) for _ in range(9)]
    vars(model)["many"] = many
    for number, each in enumerate(many):
        model.register_buffer(f"many_{number}", each)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, out=folder, chips=1, lab="lab", **options)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            batch = {"x": torch.randn(2, 6), "weights": torch.randn(2, 3)}
            with recorder.step(batch):
                optimizer.zero_grad()
                body(model, batch, optimizer, mended=mended)
        recorder.finish()
    return [str(each.message) for each in found]


WAYS = {
    seeded: ("gradient/weight", "(outputs * weights).sum().backward()"),
    by_hand: ("weight/weight", "write weights in the optimizer's step() alone"),
    into_a_buffer: ("buffer/codes", "without passing a loss"),
    through_a_gradient: ("buffer/codes", "through a gradient"),
    of_many: ("buffer/many_0", "8 tensors more"),
}


@pytest.mark.parametrize("body", WAYS)
def test_the_first_step_warns_once_with_tensor_line_and_a_way_that_helps(body, tmp_path):
    (warning,) = recorded(body, tmp_path / "run")
    tensor, words = WAYS[body]
    assert warning.startswith(f"{__file__}:")
    assert f"reaches {tensor}" in warning
    assert words in warning
    assert "\n" not in warning
    said = re.findall(r"(free|direct_paths)=(\[[^]]*\])", warning)
    assert recorded(body, tmp_path / "agreed", **{keyword: ast.literal_eval(listed) for keyword, listed in said}) == []
    if body in (seeded, by_hand):
        assert recorded(body, tmp_path / "mended", mended=True) == []


def test_patterns_name_tensors_and_one_that_names_none_is_refused(tmp_path):
    assert recorded(of_many, tmp_path / "run", direct_paths=["buffer/many_*"]) == []
    with pytest.raises(CallerError, match=r"'weight/c\*', which names no tensor of the state; .*'buffer/codes'"):
        recorded(of_many, tmp_path / "other", direct_paths=["weight/c*"])


def test_check_says_the_same(tmp_path):
    with pytest.raises(
        CallerError, match=r"batch:x reaches buffer/codes by aten\.copy_\.default without passing a loss"
    ):
        recorded(into_a_buffer, tmp_path / "run", dry_run=True)
