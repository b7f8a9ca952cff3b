from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim import (
    BLAKE3,
    DTYPE_SIZES,
    REGION_KINDS,
    CallerError,
    DeviceMemory,
    EvidenceError,
    Region,
    RegionEntry,
    parse_table,
)

TORCH_DTYPES = [
    name for name in DTYPE_SIZES if (hasattr(torch, name) and not name.startswith("uint")) or name == "uint8"
]


def _table():
    return DeviceMemory([Region.of("w", torch.zeros(4, 3), offset=2, elements=5)]).table()


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_is_read_as_bytes_in_whole_blocks(dtype):
    block = (1 << 20) // DTYPE_SIZES[dtype]
    tensor = torch.zeros(3 * block, dtype=getattr(torch, dtype))
    memory = DeviceMemory([Region.of("x", tensor, offset=block + 5, elements=4)])
    before = memory.digest()
    assert memory.byte_count == 4 * tensor.element_size() == 4 * DTYPE_SIZES[dtype]
    assert memory.copy().byte_count == 1 << 20
    tensor[block - 1] = 1  # in the block before
    tensor[2 * block] = 1  # in the block behind
    assert memory.digest() == before
    digests = {before}
    for place in (block, block + 5, 2 * block - 1):  # the rest of the block, its neighbour's, counts as well
        tensor[place] = 1
        digests.add(memory.digest())
    assert len(digests) == 4


def test_bits_count_not_values():
    """±0 and two NaNs compare equal or unequal as floats; as memory they are what their bits are."""
    for left, right in [(0x0000_0000, 0x8000_0000), (0x7FC0_0000, 0x7FC0_0001)]:
        bits = [np.array([value], dtype=np.uint32).view(np.float32) for value in (left, right)]
        digests = {DeviceMemory([Region.of("x", array)]).digest() for array in bits}
        assert len(digests) == 2


def test_torch_and_numpy_agree():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = torch.from_numpy(array.copy())
    for algorithm in ("sha256-tree/1048576", BLAKE3):
        assert DeviceMemory([Region.of("x", array)]).digest(algorithm) == DeviceMemory([Region.of("x", tensor)]).digest(
            algorithm
        )


def test_training_tensors_are_read_as_they_are_now():
    layer = torch.nn.Linear(3, 2)
    memory = DeviceMemory([Region.of(name, parameter) for name, parameter in layer.named_parameters()])
    first = memory.digest()
    copied = memory.copy()
    torch.optim.SGD(layer.parameters(), lr=0.1).zero_grad()
    layer(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    second = memory.digest()
    assert second != first
    layer.weight.data = torch.ones(2, 3)
    assert memory.digest() not in (first, second)
    assert copied.digest() == first


def test_copy_into_an_older_copys_buffers_is_the_new_memory():
    first, second = torch.zeros(5), torch.zeros(3, dtype=torch.bfloat16)
    memory = DeviceMemory([Region.of("a", first), Region.of("b", second, offset=1)])
    copied = memory.copy()
    first += 1
    second += 2
    assert copied.digest() != memory.digest()
    again = memory.copy(copied)
    assert again.digest() == memory.digest()
    first += 1
    assert again.digest() != memory.digest()
    with pytest.raises(ValueError, match="zip"):
        DeviceMemory([Region.of("a", first)]).copy(again)


def test_scalars_and_empty_slices_have_digests():
    step = torch.tensor(7, dtype=torch.int64)
    memory = DeviceMemory([Region.of("step", step, kind="optimizer"), Region.of("none", torch.zeros(0))])
    before = memory.digest()
    step += 1
    assert memory.digest() != before
    assert memory.byte_count == 8


def test_digest_does_not_depend_on_order_but_on_every_block():
    weight, moment = torch.arange(6.0), torch.arange(6.0)
    regions = [
        Region.of("w", weight, elements=3),
        Region.of("w", weight, offset=3),
        Region.of("w", moment, kind="optimizer"),
    ]
    digest = DeviceMemory(regions).digest()
    assert DeviceMemory(regions[::-1]).digest() == digest
    assert DeviceMemory(regions[::-1]).table_digest() != DeviceMemory(regions).table_digest()
    others = [
        regions[:2],
        [*regions[:2], Region.of("v", moment, kind="optimizer")],
        [*regions[:2], Region.of("w2", moment)],
        [*regions[:2], Region.of("w", moment, kind="gradient")],
        [*regions[:2], Region.of("w", moment.view(2, 3), kind="optimizer")],
    ]
    assert len({DeviceMemory(other).digest() for other in others} | {digest}) == len(others) + 1
    whole = DeviceMemory([Region.of("w", weight), regions[2]])
    assert whole.digest() == digest
    assert whole.table_digest() != DeviceMemory(regions).table_digest()


def test_two_contents_of_one_block_both_count():
    """A host cannot let one region of a tensor stand for another that holds something else."""
    shown, other = torch.zeros(6), torch.ones(6)
    honest = DeviceMemory([Region.of("w", shown, elements=3), Region.of("w", shown, offset=3)]).digest()
    for first, second in ((shown, other), (other, shown)):
        memory = DeviceMemory([Region.of("w", first, elements=3), Region.of("w", second, offset=3)])
        assert memory.digest() != honest
        assert memory.digest() != DeviceMemory([Region.of("w", other)]).digest()


def test_a_chips_regions_are_its_own():
    """Whatever the host does to its own region objects afterwards, snapshots go on over the declared slices."""
    shown, tensor = torch.zeros(6), torch.arange(6.0)
    region = Region.of("w", tensor)
    owned = DeviceMemory([region]).owned()
    before, table = owned.digest(), owned.table()
    for name, value in (("tensor", shown), ("elements", 0), ("place", 5), ("entry", Region.of("v", shown).entry)):
        object.__setattr__(region, name, value)
    assert (owned.digest(), owned.table()) == (before, table)


def test_place_among_all_blocks_counts_and_must_be_known():
    tensor = torch.arange(6.0)
    first, second = (
        Region(name="w", kind="weight", dtype="float32", shape=(6,), offset=0, elements=6, tensor=tensor, place=place)
        for place in (0, 1)
    )
    assert DeviceMemory([first]).digest() == DeviceMemory([Region.of("w", tensor)]).digest()
    assert DeviceMemory([first]).digest() != DeviceMemory([second]).digest()
    with pytest.raises(CallerError, match="its place, the number of its first block"):
        DeviceMemory([first, Region.of("v", tensor)]).digest()
    for place in (-1, True, 1 << 62):
        object.__setattr__(second, "place", place)
        with pytest.raises(CallerError, match="place"):
            DeviceMemory([second]).owned()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "secret"}, "kind 'secret' is not one of weight, gradient, optimizer, buffer"),
        ({"dtype": "float31"}, "unknown dtype"),
        ({"name": ""}, "needs a name"),
        ({"name": 1}, "malformed"),
        ({"offset": 8}, "elements 8 to 13 do not lie in shape"),
        ({"offset": -1}, "negative"),
        ({"elements": True}, "malformed size"),
        ({"elements": 2**63}, "malformed size"),
        ({"shape": "12"}, "malformed"),
        ({"shape": [-4, -3]}, "negative"),
        ({"shape": [1] * 33}, "malformed"),
        ({"more": 1}, "fields are missing or unknown"),
    ],
)
def test_malformed_table_is_the_labs_fault(change, message):
    with pytest.raises(EvidenceError, match=message):
        parse_table([{**_table()[0], **change}])


@pytest.mark.parametrize("table", [None, [], {}, "x", [7], [None]])
def test_table_must_have_lines(table):
    with pytest.raises(EvidenceError, match="region table"):
        parse_table(table)


def test_duplicate_regions_are_refused():
    with pytest.raises(EvidenceError, match="two regions are named 'weight/w@2'"):
        parse_table(_table() * 2)
    tensor = torch.zeros(2)
    with pytest.raises(CallerError, match="two regions are named 'weight/w@0'"):
        DeviceMemory([Region.of("w", tensor), Region.of("w", tensor, elements=1)])
    with pytest.raises(CallerError, match="at least one region"):
        DeviceMemory([])


def test_regions_of_the_wrong_kind_are_the_callers_mistake():
    with pytest.raises(CallerError, match="not contiguous"):
        Region.of("w", torch.zeros(3, 4).T)
    with pytest.raises(CallerError, match="do not lie in shape"):
        Region.of("w", torch.zeros(3), offset=2, elements=2)
    with pytest.raises(CallerError, match="kind"):
        Region.of("w", torch.zeros(3), kind="other")
    tensor = torch.zeros(3)
    region = Region.of("w", tensor)
    tensor.resize_(4)
    with pytest.raises(CallerError, match=r"shape \(4,\), not \(3,\)"):
        DeviceMemory([region]).digest()


class HostArray(np.ndarray):
    """An array whose methods are the host's."""

    def reshape(self, *shape):  # type: ignore[override]
        raise AssertionError("host code ran")

    @property
    def dtype(self):
        raise AssertionError("host code ran")


class HostTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError("host code ran")


with FakeTensorMode():
    FAKE = torch.zeros(3)

NOT_PLAIN = {
    "array subclass": (lambda: np.zeros(3).view(HostArray), "is of type 'HostArray', not a plain NumPy array or torch"),
    "masked array": (lambda: np.ma.zeros(3), "is of type 'MaskedArray'"),
    "tensor subclass": (lambda: torch.zeros(3).as_subclass(HostTensor), "is of type 'HostTensor'"),
    "fake tensor": (lambda: FAKE, "is of type 'FakeTensor'"),
    "list": (lambda: [1.0], "is of type 'list'"),
    "meta": (lambda: torch.empty(3, device="meta"), "has no memory"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse or nested"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "sparse or nested"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), "sparse or nested"),
    "negated": (lambda: torch._neg_view(torch.ones(3)), "can't be read"),
    "structured": (lambda: np.zeros(3, dtype="f4,i4"), "unknown dtype"),
    "objects": (lambda: np.zeros(3, dtype=object), "unknown dtype"),
    "dates": (lambda: np.zeros(3, dtype="M8[s]"), "unknown dtype"),
    "swapped bytes": (lambda: np.zeros(3, dtype=">f4"), "unknown dtype"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR|The PyTorch API of nested")
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_only_plain_arrays_and_tensors_are_memory(name):
    make, message = NOT_PLAIN[name]
    with pytest.raises(CallerError, match=message):
        DeviceMemory([Region.of("x", make())]).owned()


def test_memory_that_is_only_described_is_not_read():
    memory = DeviceMemory([Region.of("x", torch.empty(3, device="meta"))])
    assert memory.table_digest() == DeviceMemory([Region.of("x", torch.empty(3))]).table_digest()
    with pytest.raises(CallerError, match="region 'x': tensor has no memory"):
        memory.digest()


def test_batched_tensors_are_refused_before_a_snapshot_needs_them():
    def attach(value):
        with pytest.raises(CallerError, match="region 'x': the bytes of its tensor can't be read"):
            DeviceMemory([Region.of("x", value)]).owned()
        return value

    torch.vmap(attach)(torch.ones(2, 3))


@pytest.mark.parametrize("change", [{"name": type("Text", (str,), {})("w")}, {"offset": True}, {"shape": [3]}])
def test_fields_of_a_region_have_exact_types(change):
    fields = {"name": "w", "kind": "weight", "dtype": "float32", "shape": (3,), "offset": 0, "elements": 3, **change}
    with pytest.raises(CallerError, match="of type"):
        Region(**fields, tensor=torch.zeros(3))


def test_modes_and_attributes_of_the_host_do_not_run_while_memory_is_read():
    ran = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran.append(function)
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            ran.append(function)
            return function(*args, **(kwargs or {}))

    tensors = {"t": torch.arange(4.0), "p": torch.nn.Parameter(torch.arange(4.0))}
    expected = DeviceMemory([Region.of(name, tensor) for name, tensor in tensors.items()]).digest()
    for name in ("detach", "reshape", "is_contiguous", "view", "cpu"):
        setattr(tensors["t"], name, lambda *_: ran.append("attribute"))
    with Dispatch(), Function(), FakeTensorMode():
        memory = DeviceMemory([Region.of(name, tensor) for name, tensor in tensors.items()])
        assert memory.copy().digest() == memory.digest() == expected
    assert ran == []


def test_tensor_that_turns_into_a_subclass_is_not_read():
    tensor = torch.zeros(3)
    memory = DeviceMemory([Region.of("w", tensor)])
    tensor.__class__ = HostTensor
    with pytest.raises(CallerError, match="region 'w': is of type 'HostTensor'"):
        memory.digest()


def freed():
    tensor = torch.zeros(6)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk():
    tensor = torch.zeros(6)
    tensor.untyped_storage().resize_(20)
    return tensor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (freed, "can't be read: .* out of bounds for storage of size 0"),
        (shrunk, "can't be read: .* out of bounds for storage of size 20"),
        (lambda: np.lib.stride_tricks.as_strided(np.zeros(2), (1000,)), "beyond the memory that it is a part of"),
    ],
    ids=["freed", "shrunk", "oversized"],
)
def test_memory_that_is_not_all_there_is_refused_when_attached(make, message):
    with pytest.raises(CallerError, match=message):
        DeviceMemory([Region.of("x", make())]).owned()


@pytest.mark.parametrize("wrap", [lambda tensor: tensor, lambda tensor: tensor.numpy()], ids=["torch", "numpy"])
def test_regions_share_all_of_their_bytes_or_none(wrap):
    held = torch.arange(8.0)

    def attached(*parts):
        return DeviceMemory([Region.of(name, wrap(held[low:high])) for name, low, high in parts]).owned()

    apart = attached(("a", 0, 4), ("b", 4, 8))
    assert apart.digest() == DeviceMemory([Region.of("a", held[:4]), Region.of("b", held[4:])]).digest()
    tied = attached(("a", 0, 4), ("b", 0, 4))
    before = tied.digest()
    held[1] = 9
    assert tied.digest() != before
    for low, high in ((3, 7), (1, 3), (0, 8)):
        with pytest.raises(CallerError, match=r"'[ab]' and '[ab]' share a part of their bytes"):
            attached(("a", 0, 4), ("b", low, high))
    with pytest.raises(CallerError, match="share a part"):
        DeviceMemory([Region.of("a", held, elements=5), Region.of("a", held, offset=4)]).owned()


def test_what_becomes_of_a_tensor_later_spoils_no_snapshot():
    """A chip goes by addresses: the bytes that it was shown stay, whatever the host makes of the tensors."""
    one, other, third = torch.arange(3.0), torch.arange(4.0), torch.nn.Parameter(torch.arange(5.0))
    memory = DeviceMemory([Region.of(name, each) for name, each in (("o", one), ("t", other), ("p", third))]).owned()
    before = memory.digest()
    one.__class__ = HostTensor
    other.data = torch.zeros(2, 2)
    with torch.no_grad():
        third.add_(1)
    assert memory.digest() != before
    with torch.no_grad():
        third.sub_(1)
    assert memory.copy().digest() == before
    with pytest.raises(RuntimeError, match="not resizable"):  # memory that a chip holds is not freed
        third.untyped_storage().resize_(0)


def test_owned_memory_holds_plain_regions_only():
    class HostRegion(Region):
        def view(self):
            raise AssertionError("host code ran")

    region = Region.of("w", torch.zeros(3))
    assert DeviceMemory([region]).owned().digest() == DeviceMemory([region]).digest()
    with pytest.raises(CallerError, match="must consist of objects of type Region"):
        DeviceMemory([HostRegion.of("w", torch.zeros(3))]).owned()


def test_table_lines_are_complete():
    assert set(_table()[0]) == set(RegionEntry.__dataclass_fields__)
    assert REGION_KINDS == ("weight", "gradient", "optimizer", "buffer")


@pytest.mark.cuda
def test_cuda_tensors_are_copied_to_the_host():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    tensor = torch.arange(6, dtype=torch.bfloat16)
    assert DeviceMemory([Region.of("w", tensor.cuda())]).digest() == DeviceMemory([Region.of("w", tensor)]).digest()
