"""Forms of model folders: what is compared, listed or refused, and that OpenSSF Model Signing gives the same digest."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import shutil
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from model_signing import hashing, signing
from safetensors.torch import load, save, save_file
from torch import nn

from firmware_sim.errors import CallerError
from inspector.bundle.builder import bundle_of
from inspector.bundle.checker import check_bundle
from inspector.bundle.models import about_model, read_model, subject_of_model
from inspector.inspection.trust import Trust
from monitor import Recorder
from tests.conftest import NOW, STARTED, Recorded
from tests.inspector.bundle.conftest import INSPECTORATE, SETTINGS, made

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Small(nn.Module):
    """A tied weight, a bias, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.out = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.out(self.head(self.embed(batch)) * self.scale)


@dataclass(frozen=True)
class World:
    """A model that was trained and inspected, and a folder for it."""

    made: object
    model: nn.Module
    place: Path

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    @property
    def all(self) -> dict[str, torch.Tensor]:
        return {**self.weights, "scale": self.model.get_buffer("scale").clone()}


@pytest.fixture(scope="module")
def inspected(tmp_path_factory, devices):
    folder = tmp_path_factory.mktemp("forms")
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any]
    options = {"seed": 5, "chips": 2, "snapshot_rate": Fraction(1, 2), "lab": "lab", "started": STARTED, "hours": 1.0}
    recorder = Recorder(model, optimizer, out=folder / "run", **options)
    for batch in torch.ones(2, 3, 8):
        with recorder.step(batch):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    recorder.finish()
    recorded = Recorded(folder / "run", Trust.load([folder / "run.trust.json"], [folder / "run"]), NOW)
    key = ec.generate_private_key(ec.SECP256R1())
    (folder / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return made(recorded, devices), model, folder / "key"


@pytest.fixture
def world(inspected, tmp_path):
    (tmp_path / "model").mkdir()
    return World(inspected[0], inspected[1], tmp_path / "model")


def signed(path: Path, key: Path, out: Path) -> tuple[str, dict[str, str]]:
    """Digest and files by the statement that Model Signing signs, links allowed where the folder has some."""
    links = any(each.is_symlink() for each in [path, *path.rglob("*")])
    config = signing.Config().use_elliptic_key_signer(private_key=key)
    config.set_hashing_config(hashing.Config().set_allow_symlinks(links)).sign(path, out)
    statement = json.loads(base64.b64decode(json.loads(out.read_bytes())["dsseEnvelope"]["payload"]))
    files = {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}
    return statement["subject"][0]["digest"]["sha256"], files


def whole(world, *, tensors=None, name="model.safetensors", **options):
    path = world.place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(world.all if tensors is None else tensors, path, **options)


def sharded(world, *, folder="", index=True, names=SHARDS, changes=None, removed=()):
    """Two shards; an index with ``changes``."""
    tensors = world.all
    halves = [dict(list(tensors.items())[:2]), dict(list(tensors.items())[2:])]
    for name, half in zip(names, halves, strict=True):
        whole(world, tensors=half, name=f"{folder}{name}")
    if index:
        listed = {each: f"{folder}{name}" for name, half in zip(names, halves, strict=True) for each in half}
        listed = {each: name for each, name in {**listed, **(changes or {})}.items() if each not in removed}
        (world.place / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": listed}))


def beside(world, *names, content="x"):
    """The model, and other files."""
    whole(world)
    for name in names:
        (world.place / name).parent.mkdir(parents=True, exist_ok=True)
        (world.place / name).write_text(content)


def cached(world, repository="models--org--name", blobs="models--org--name"):
    """A Hub cache: snapshots of links to blobs; returns the snapshot."""
    cache = world.place.parent / "hub"
    snapshot = cache / repository / "snapshots" / "0a1b"
    (cache / blobs / "blobs").mkdir(parents=True)
    (cache / blobs / "blobs" / "5f00").write_bytes(save(world.all))
    snapshot.mkdir(parents=True)
    target = Path(os.path.relpath(cache / blobs / "blobs" / "5f00", snapshot))
    (snapshot / "model.safetensors").symlink_to(target)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def raw(world, header, size=None, data=b"", name="model.safetensors"):
    """A file with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (world.place / name).write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)


def linked(world, target, name="model.safetensors", *, keep=True):
    """A link in the folder; where it leads there is the model, if that is to be."""
    if keep:
        (world.place.parent / "elsewhere").mkdir()
        save_file(world.all, world.place.parent / "elsewhere" / "model.safetensors")
    (world.place / name).symlink_to(target)


def named_through_a_link(world):
    whole(world)
    (world.place.parent / "current").symlink_to(world.place)
    return world.place.parent / "current"


def one_file(world, name="model.safetensors"):
    whole(world, name=name)
    return world.place / name


def entry(start, end, shape=(2,), kind="F32"):
    return {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}


COMPARED = {
    "a file": (one_file, []),
    "a file of another name": (lambda world: one_file(world, "weights.ST"), []),
    "a folder with a file": (whole, []),
    "weights without buffers": (lambda world: whole(world, tensors=world.weights), []),
    "metadata in the header": (lambda world: whole(world, metadata={"format": "pt"}), []),
    "tensors in another order": (lambda world: whole(world, tensors=dict(reversed(world.all.items()))), []),
    "configuration beside": (lambda world: beside(world, "config.json"), ["config.json"]),
    "sharded": (sharded, []),
    "sharded without an index": (lambda world: sharded(world, index=False), []),
    "sharded below": (lambda world: sharded(world, folder="parts/"), []),
    "whole and sharded": (lambda world: (sharded(world), whole(world)), []),
    "an index of .bin beside": (
        lambda world: (beside(world, "pytorch_model.bin.index.json"), sharded(world)),
        ["pytorch_model.bin.index.json"],
    ),
    ".bin beside": (lambda world: beside(world, "pytorch_model.bin"), ["pytorch_model.bin"]),
    "many formats beside": (
        lambda world: beside(world, "a.pt", "b.gguf", "c", "onnx/d.onnx"),
        ["a.pt", "b.gguf", "c", "onnx/d.onnx"],
    ),
    "other letters beside": (lambda world: beside(world, "OTHER.SafeTensors"), ["OTHER.SafeTensors"]),
    "from a git repository": (
        lambda world: beside(world, ".git/HEAD", ".gitattributes", ".gitignore", ".github/ci.yml", ".gitmodules"),
        [".gitmodules"],
    ),
    "git below": (lambda world: beside(world, "sub/.git/HEAD", "sub/.gitignore"), ["sub/.git/HEAD", "sub/.gitignore"]),
    "a snapshot in a Hub cache": (cached, ["config.json"]),
    "downloaded from the Hub": (
        lambda world: beside(world, ".cache/huggingface/download/model.safetensors.metadata"),
        [".cache/huggingface/download/model.safetensors.metadata"],
    ),
    "named through a link": (named_through_a_link, []),
    "accents in a name": (lambda world: whole(world, name=normalize("NFC", "modèle.safetensors")), []),
    "folders before dots": (lambda world: beside(world, "a.b", "a/b"), ["a.b", "a/b"]),
    "empty files and folders": (
        lambda world: beside(world, "empty", content="") or (world.place / "f").mkdir(),
        ["empty"],
    ),
}
"""What is made, and which files are listed as not compared."""


def piped(world):
    os.mkfifo(world.place / "pipe")
    return whole(world)


REFUSED = {
    "a tensor twice": (
        lambda world: (sharded(world), whole(world, tensors={"scale": torch.ones(8)}, name="more.safetensors")),
        "tensor 'scale' is not the same in 'model-00002-of-00002.safetensors' and in 'more.safetensors'",
    ),
    "an index of other files": (
        lambda world: sharded(world, changes={"scale": "pytorch_model.bin"}),
        "index.json' says that tensor 'scale' is in 'pytorch_model.bin', but no compared file of that name has it",
    ),
    "an index that leads up": (
        lambda world: sharded(world, changes={"scale": f"../model/{SHARDS[1]}"}),
        "says that tensor 'scale' is in '../model/model-00002",
    ),
    "an index to the wrong shard": (
        lambda world: sharded(world, changes={"scale": SHARDS[0]}),
        "says that tensor 'scale' is in",
    ),
    "an index of tensors that are missing": (
        lambda world: sharded(world, changes={"bias": SHARDS[0]}),
        "says that tensor 'bias' is in",
    ),
    "an index that leaves some out": (lambda world: sharded(world, removed=["scale"]), "leaves out tensor 'scale'"),
    "an index that is none": (lambda world: beside(world, INDEX, content="{}"), "is not an index: it has no map"),
    "a key of an index twice": (
        lambda world: beside(world, INDEX, content='{"weight_map": {}, "weight_map": {}}'),
        "the key 'weight_map' occurs twice",
    ),
    "a link to a folder": (lambda world: (whole(world), linked(world, "../elsewhere", "x")), "x is a link that leads"),
    "a link out of the folder": (
        lambda world: linked(world, "../elsewhere/model.safetensors"),
        "model.safetensors is a link that leads out of the model's folder: replace it by the file that it leads to",
    ),
    "a link within the folder": (
        lambda world: (whole(world), linked(world, "model.safetensors", "other.safetensors", keep=False)),
        "other.safetensors is a link that leads out",
    ),
    "a link to nothing": (lambda world: linked(world, "nothing", keep=False), "is a link that leads out"),
    "a link to itself": (lambda world: linked(world, "model.safetensors", keep=False), "is a link that leads out"),
    "blobs of another repository": (
        lambda world: cached(world, blobs="models--org--other"),
        "model.safetensors is a link that leads out",
    ),
    "blobs beside no repository": (
        lambda world: cached(world, repository="name", blobs="name"),
        "model.safetensors is a link that leads out",
    ),
    "a pipe": (
        piped,
        "pipe cannot be read as a file of a model: it is",
    ),
    "other letters alone": (
        lambda world: whole(world, name="MODEL.SafeTensors"),
        "has no file whose name ends in .safetensors",
    ),
    "other letters of the same name": (
        lambda world: beside(world, "MODEL.SafeTensors"),
        "some file systems do not distinguish the names 'MODEL.SafeTensors' and 'model.safetensors'",
    ),
    "names equal but for case": (
        lambda world: beside(world, "MODEL.safetensors", content=""),
        "some file systems do not distinguish the names 'MODEL.safetensors' and 'model.safetensors': rename one "
        "of them",
    ),
    "names equal but for their Unicode form": (
        lambda world: beside(world, "\u00e9", "e\u0301"),
        "some file systems do not distinguish the names",
    ),
    "a name that is no text": (
        lambda world: beside(world, os.fsdecode(b"\xff.bin")),
        r"the name of a model's file is not valid UTF-8: '\udcff.bin'",
    ),
    "tensors that overlap": (
        lambda world: raw(world, {"a": entry(0, 8), "b": entry(4, 12)}, data=bytes(12)),
        "tensor 'b' overlaps another, leaves a gap",
    ),
    "a gap between tensors": (
        lambda world: raw(world, {"a": entry(0, 8), "b": entry(12, 20)}, data=bytes(20)),
        "tensor 'b' overlaps another, leaves a gap",
    ),
    "bytes after the last tensor": (
        lambda world: raw(world, {"a": entry(0, 8)}, data=bytes(9)),
        "it does not end with its last tensor",
    ),
    "a tensor cut short": (
        lambda world: raw(world, {"a": entry(0, 8)}, data=bytes(7)),
        "it does not end with its last tensor",
    ),
    "another size than the shape's": (
        lambda world: raw(world, {"a": entry(0, 8, (3,))}, data=bytes(8)),
        "is not as long as its shape",
    ),
    "a type that no run has": (
        lambda world: raw(world, {"a": entry(0, 2, kind="F8_E8M0")}, data=bytes(2)),
        "tensor 'a' is of type 'F8_E8M0', which no run can have",
    ),
    "a place that is none": (
        lambda world: raw(world, {"a": {**entry(0, 8), "data_offsets": "08"}}, data=bytes(8)),
        "it is not safetensors: its header is malformed",
    ),
    "a header of 2^63 bytes": (lambda world: raw(world, b"", size=1 << 63), f"{1 << 63} bytes of a safetensors header"),
    "a key of a header twice": (
        lambda world: raw(world, b'{"a": {}, "a": {}}'),
        "the key 'a' occurs twice",
    ),
    "a file without a header": (lambda world: raw(world, b"", size=0), "not a JSON document"),
    "an empty folder": (lambda world: None, "has no file whose name ends in .safetensors"),
}
"""What is made, and what is said of it."""


def wrapped(prefix):
    return lambda tensors: {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


DIFFERENT = {
    "the prefix of data-parallel training": (
        wrapped("module."),
        "'embed.weight' (float32 [8, 8]) is missing: the prefix of a wrapper explains it, since there is "
        "'module.embed.weight'; 6 more differ",
    ),
    "the prefix of a compiler": (
        wrapped("_orig_mod."),
        "the prefix of a wrapper explains it, since there is 'embed.weight'; 6 more",
    ),
    "both names of a tied weight": (
        lambda tensors: {**tensors, "head.weight": tensors["embed.weight"].clone()},
        "'head.weight' (float32 [8, 8]) is unknown to the run: both names of a tied weight explain it, since "
        "'embed.weight' has the same bytes",
    ),
    "the other name of a tied weight": (
        lambda tensors: {"head.weight" if "embed" in name else name: each for name, each in tensors.items()},
        "'embed.weight' (float32 [8, 8]) is missing: both names of a tied weight explain it, since 'head.weight' has",
    ),
    "a cast": (
        lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()},
        "'embed.weight' (bfloat16 [8, 8]) differs from the run's (float32 [8, 8]): it is the run's, cast to "
        "another type; 3 more differ",
    ),
    "another shape": (
        lambda tensors: {**tensors, "out.bias": tensors["out.bias"][:2].clone()},
        "'out.bias' (float32 [2]) differs from the run's (float32 [4])",
    ),
    "other numbers": (
        lambda tensors: {**tensors, "out.bias": tensors["out.bias"] + 1},
        "'out.bias' (float32 [4]) differs from the run's (float32 [4])",
    ),
    "another buffer": (lambda tensors: {**tensors, "scale": torch.ones(8)}, "'scale' (float32 [8]) differs from"),
    "a weight that is missing": (
        lambda tensors: {name: each for name, each in tensors.items() if name != "out.bias"},
        "'out.bias' (float32 [4]) is missing",
    ),
    "a tensor of nobody": (lambda tensors: {**tensors, "x": torch.zeros(1)}, "'x' (float32 [1]) is unknown to the run"),
    "a gradient": (
        lambda tensors: {**tensors, "gradient/out.bias": torch.zeros(4)},
        "'gradient/out.bias' (float32 [4]) is unknown to the run",
    ),
}
"""How a file's tensors differ from the run's, and what is said."""

LATER = {
    "nothing": (lambda place: None, ""),
    "the folder is renamed": (lambda place: None, ""),
    "a repository is made of it": (lambda place: (place / ".git").mkdir(), ""),
    "a file is renamed": (
        lambda place: (place / SHARDS[1]).rename(place / "model-00003.safetensors"),
        "'model-00002-of-00002.safetensors' is missing",
    ),
    "shards change their names": (
        lambda place: (
            (place / SHARDS[0]).rename(place / "x"),
            (place / SHARDS[1]).rename(place / SHARDS[0]),
            (place / "x").rename(place / SHARDS[1]),
        ),
        "'model-00001-of-00002.safetensors' is another",
    ),
    "a letter's case": (
        lambda place: (place / SHARDS[0]).rename(place / SHARDS[0].replace("tensors", "Tensors")),
        "'model-00001-of-00002.safeTensors' is not among its files",
    ),
    "a file is added": (lambda place: (place / "model.bin").write_text("x"), "'model.bin' is not among its files"),
    "a file is lost": (lambda place: (place / "config.json").unlink(), "'config.json' is missing"),
    "a byte is another": (lambda place: (place / "config.json").write_text("[]"), "'config.json' is another"),
}
"""What happens to a folder between inspection and verification, and what that one says."""


@pytest.mark.parametrize("form", COMPARED)
def test_model_signing_gives_the_same_digest(world, inspected, form):
    make, not_compared = COMPARED[form]
    path = make(world)
    path = path if isinstance(path, Path) else world.place
    told = subject_of_model(read_model(path), world.made.case.transcripts)
    assert (told["sha256"], told["files"]) == signed(path, inspected[2], world.place.parent / "model.sig")
    assert told["not_compared"] == not_compared
    assert told["name"] == path.name
    assert told["buffers"] == ([] if "without buffers" in form else ["scale"])
    ignored = [".git", ".gitattributes", ".github", ".gitignore"] if form == "from a git repository" else []
    assert told["ignored"] == ignored


@pytest.mark.parametrize("form", REFUSED)
def test_what_loaders_could_read_in_two_ways_is_refused(world, form):
    make, text = REFUSED[form]
    path = make(world)
    with pytest.raises(CallerError) as caught:
        subject_of_model(read_model(path if isinstance(path, Path) else world.place), world.made.case.transcripts)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", DIFFERENT)
def test_a_difference_is_named_with_what_explains_it(world, form):
    change, text = DIFFERENT[form]
    whole(world, tensors=change(world.all))
    with pytest.raises(CallerError) as caught:
        subject_of_model(read_model(world.place), world.made.case.transcripts)
    start = "the tensors of 'model' are not the weights with which a run ended: "
    assert text in str(caught.value).removeprefix(start)
    assert str(caught.value).startswith(start)


@pytest.fixture(scope="module")
def bundle(inspected, tmp_path_factory):
    """A bundle about a sharded model, and its folder."""
    made, model, _ = inspected
    place = tmp_path_factory.mktemp("later") / "model"
    world = World(made, model, place)
    sharded(world)
    (place / "config.json").write_text("{}")
    evidence = {**made.verdict.evidence, "model": subject_of_model(read_model(place), made.case.transcripts)}
    verdict = replace(made.verdict, evidence=evidence)
    return bundle_of(made.case, verdict, made.trust, SETTINGS, INSPECTORATE), place


@pytest.mark.parametrize("form", LATER)
def test_a_bundle_is_about_the_files_that_were_inspected(bundle, inspected, tmp_path, form):
    data, place = bundle
    change, text = LATER[form]
    copy = tmp_path / ("other" if "renamed" in form else "model")
    shutil.copytree(place, copy)
    change(copy)
    if text:
        with pytest.raises(CallerError) as caught:
            check_bundle(data, inspected[0].trust, model=read_model(copy, tensors=False))
        assert str(caught.value) == f"the bundle is about another model: {text}"
    else:
        verdict = check_bundle(data, inspected[0].trust, model=read_model(copy, tensors=False))
        assert verdict.evidence["verifies"]
        assert verdict.evidence["model"]["ignored"] == ([".git"] if (copy / ".git").exists() else [])


def test_other_letters_are_listed(world):
    beside(world, "b.bin", "config.json", content="x" * 9999)
    whole(world, name="sub/MODEL.SafeTensors")
    told = subject_of_model(read_model(world.place), world.made.case.transcripts)
    assert told["not_compared"] == ["b.bin", "config.json", "sub/MODEL.SafeTensors"]
    assert about_model(told) == (
        "'model': 1 of 4 files compared with the last state of a run; not compared: 'b.bin', 'config.json', "
        "'sub/MODEL.SafeTensors'; among its buffers: 'scale'"
    )
    beside(world, *(f"{number}.bin" for number in range(9)))
    told = subject_of_model(read_model(world.place), world.made.case.transcripts)
    assert "'sub/MODEL.SafeTensors', '0.bin', '1.bin' and 7 more; among" in about_model(told)


def test_what_is_hashed_is_what_was_compared(world, monkeypatch):
    """Whoever changes the name's file once it is open reaches nobody: it is opened once."""
    whole(world)
    path = world.place / "model.safetensors"
    honest, opened, taken = read_model(world.place), [], os.open

    def swapping(name, *words):
        descriptor = taken(name, *words)
        opened.append(str(name))
        path.unlink()
        save_file({"x": torch.ones(3)}, path)
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr("inspector.bundle.models.os.open", swapping)
        assert read_model(world.place) == honest
    assert opened == [str(path)]
    assert read_model(world.place) != honest


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A file with another header, another byte, or another length."""
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    kind = rng.randrange(4)
    if kind == 0:
        at = rng.randrange(len(data))
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 1:
        return data[: rng.randrange(len(data))] + bytes(rng.randrange(2) * rng.randrange(99))
    if kind == 2:
        names = [name for name in head if name != "__metadata__"]
        changes: list[tuple[str, list[Any]]] = [
            ("dtype", ["F32", "BF16", "F4", 1]),
            ("shape", [[8, 8], [64], [], None, [-1]]),
        ]
        key, values = rng.choice(changes)
        head[rng.choice(names)][key] = rng.choice(values)
    else:
        first, second = rng.sample([name for name in head if name != "__metadata__"], 2)
        head[first]["data_offsets"], head[second]["data_offsets"] = (
            head[rng.choice([first, second])]["data_offsets"],
            rng.choice([head[first]["data_offsets"], [0, 16], [0.0, 32.0], [-4, 4], [1 << 70, 0], "01"]),
        )
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def test_what_is_read_is_what_the_formats_own_reader_reads(world):
    """Of files at random: no other tensors, and each refusal is one line."""
    rng, refused = random.Random(37), []
    path = one_file(world)
    first = path.read_bytes()
    for _ in range(300):
        data = mutated(first, rng)
        path.write_bytes(data)
        try:
            found = read_model(path)
        except CallerError as error:
            refused.append(str(error))
            continue
        assert found.summary["files"] == {".": hashlib.sha256(data).hexdigest()}
        save_file(load(data), world.place / "again.safetensors")
        assert read_model(world.place / "again.safetensors").tensors == found.tensors
    assert 100 < len(refused) < 280
    assert not any("\n" in each for each in refused)
