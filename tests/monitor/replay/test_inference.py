"""Which answers can be ordered, and what the steps that give them hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey
from monitor.presets import initialise, preset
from monitor.replay.inference import OUTPUTS, Inference, answers_of
from monitor.replay.ordering import order_inference
from monitor.transcript.orders import OrderFolder

CLIENT = SigningKey.generate(bytes(32))
PROMPTS = (b"The with statement", b"import", b"A list")
ASKED = Inference(preset="tiny-gpt", prompts=PROMPTS, tokens=3, temperature=0.9, seed=7, checkpoint_every=2)


def model_of(seed: int = 3):
    model = preset("tiny-gpt").build().eval()
    initialise(model, seed)
    return model


def weights(seed: int = 3):
    return {f"weight/{name}": each.detach() for name, each in model_of(seed).named_parameters()}


def made(folder, asked=ASKED, seed=3):
    order_inference(asked, weights(seed), folder, CLIENT)
    return OrderFolder(folder, CLIENT.verifying)


def test_the_likeliest_token_needs_no_key_and_a_seed_chooses_the_others(tmp_path):
    greedy = [made(tmp_path / f"{seed}", replace(ASKED, temperature=0, seed=seed)) for seed in (1, 2)]
    programs = [next(iter(each.order.programs)) for each in greedy]
    assert programs[0] == programs[1]
    assert not any(call["draws"] for call in greedy[0].program(programs[0]).calls)
    assert [each.order.declaration.seed for each in greedy] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"preset": "digits-cnn"}, "takes no prompts"),
        ({"prompts": ()}, "there must be a prompt"),
        ({"prompts": (b"a", b"")}, "none may be empty"),
        ({"prompts": (b"a" * 60,), "tokens": 6}, "leaves room for 1 to 5 tokens of an answer, not 6"),
        ({"prompts": (b"a" * 65,), "tokens": 1}, "at most 64 bytes"),
        ({"tokens": 0}, "not 0"),
        ({"temperature": -1.0}, "the temperature must be"),
        ({"temperature": float("nan")}, "the temperature must be"),
        ({"temperature": 1e-30}, "the temperature must be"),
    ],
)
def test_an_inference_that_no_model_can_answer_is_refused(changes, why):
    with pytest.raises(CallerError, match=why):
        replace(ASKED, **changes)


def test_only_weights_go_into_a_task_and_those_of_another_model_are_refused(tmp_path):
    held = {**weights(), "optimizer/head.weight/step": torch.zeros(()), "gradient/head.weight": torch.zeros(1)}
    order_inference(ASKED, held, tmp_path / "held", CLIENT)
    assert OrderFolder(tmp_path / "held", CLIENT.verifying).state().keys() == {*weights(), OUTPUTS}
    for state in (
        {},
        {**weights(), "buffer/outputs": torch.zeros(1)},
        {**weights(), "weight/head.weight": torch.zeros(2)},
    ):
        with pytest.raises(CallerError, match="the weights are not those of the model: the first difference is"):
            order_inference(ASKED, state, tmp_path / "task", CLIENT)
    assert [path.name for path in tmp_path.iterdir()] == ["held"]


def test_a_token_that_is_no_byte_is_shown_as_a_number_alone(tmp_path):
    task = made(tmp_path / "task")
    state = {OUTPUTS: torch.tensor([[72, 105, 33], [256, 0, 0], [-1, 1 << 62, 0]])}
    assert [each["answer"] for each in answers_of(task, state)] == ["Hi!", None, None]
