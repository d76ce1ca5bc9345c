"""Weight deltas: bit-exact for every dtype, small, and refusing whatever cannot be exact."""

import io
import math
import struct

import numpy as np
import pyarrow as pa
import pytest
import torch
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.ops import records
from furlong.ops.weights import codec, delta
from furlong.ops.weights.delta import DeltaError, apply, encode, encode_and_digest, full_bytes
from furlong.ops.weights.digest import raw_bytes, tensor_digest
from furlong.ops.weights.layout import Piece
from furlong.ops.weights.scan import scan

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip
MIB = 2**20


def from_bytes(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data.size:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data.copy()).view(dtype).reshape(shape)


def make(old, new, version=2):
    return encode(version, version - 1, "r", old, new, {name: tensor_digest(t) for name, t in new.items()})


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(raw_bytes(a), raw_bytes(b))


@st.composite
def pairs(draw):
    """Old and new tensors with random bits (so NaNs, infinities and both zeros) and any share of changed elements."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = torch.empty(0, dtype=dtype).element_size()
    old = rng.integers(0, 2 if dtype == torch.bool else 256, (math.prod(shape), size), dtype=np.uint8)
    other = rng.integers(0, 2 if dtype == torch.bool else 256, old.shape, dtype=np.uint8)
    keep = rng.random((len(old), 1)) >= draw(st.sampled_from([0.0, 0.02, 0.3, 0.7, 1.0]))
    new = np.where(keep, old, other)
    return from_bytes(old.reshape(-1), dtype, shape), from_bytes(new.reshape(-1), dtype, shape)


@st.composite
def versions(draw):
    """Two sets of tensors: most in both, some new, some gone, some with another layout."""
    old, new = {}, {}
    for i in range(draw(st.integers(1, 3))):
        a, b = draw(pairs())
        fate = draw(st.sampled_from(["both"] * 5 + ["new", "gone", "relaid"]))
        if fate != "new":
            old[f"t{i}"] = draw(pairs())[0] if fate == "relaid" else a
        if fate != "gone":
            new[f"t{i}"] = b
    return old, new


def has_same_layout(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and a.dtype == b.dtype and a.shape == b.shape


CHUNKS = [16, 64, 16 * MIB]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(versions(), st.sampled_from(CHUNKS))
def test_any_change_is_exact_and_the_base_stays_as_it_was(sets, chunk):
    old, new = sets
    before = {name: tensor_digest(t) for name, t in old.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK_BYTES", chunk)
        patch.setattr(delta, "_WORTH_A_THREAD", 0)
        rows = make(old, new)
        encoded = encode_and_digest(2, 1, "r", old, new)
    got = apply(rows.take(pa.array(reversed(range(rows.num_rows)), pa.int64())), old)
    changed = {n for n in new if not has_same_layout(old.get(n), new[n]) or not same_bits(old[n], new[n])}
    assert set(got) == changed == set(rows["name"].to_pylist())
    assert all(same_bits(got[name], new[name]) for name in changed)
    assert {name: tensor_digest(t) for name, t in old.items()} == before
    assert encoded.rows.equals(rows)
    assert encoded.digests == {name: tensor_digest(t) for name, t in new.items()}
    reference = sum(differing(old.get(name), t) for name, t in new.items()) / max(
        1, sum(t.numel() for t in new.values())
    )
    assert encoded.changed_fraction == reference


def differing(a: torch.Tensor | None, b: torch.Tensor) -> int:
    if not has_same_layout(a, b):
        return b.numel()
    if not b.numel():
        return 0
    x, y = raw_bytes(a).reshape(b.numel(), -1), raw_bytes(b).reshape(b.numel(), -1)
    return sum(bool((x[i] != y[i]).any()) for i in range(len(x)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(pairs(), min_size=1, max_size=3), st.booleans(), st.sampled_from(CHUNKS), st.data())
def test_a_piece_is_what_cutting_the_new_tensor_gives(tensors, based, chunk, data):
    new = {f"t{i}": b for i, (_, b) in enumerate(tensors)}
    old = {f"t{i}": a for i, (a, _) in enumerate(tensors)} if based else {}
    pieces = {}
    for name, tensor in new.items():
        sizes = tuple(tensor.shape) or (1,)
        dim = data.draw(st.integers(0, len(sizes) - 1))
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, sizes[dim])] * 2)))
        pieces[name] = Piece(name, dim, start, stop) if tensor.dim() else Piece(name, 0, 0, 1)

    def cut(tensor: torch.Tensor, name: str) -> torch.Tensor:
        piece = pieces[name]
        return tensor.narrow(piece.dim, piece.start, piece.stop - piece.start).contiguous() if tensor.dim() else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK_BYTES", chunk)
        rows = make(old, new)
    got = apply(rows, {name: cut(t, name) for name, t in old.items()}, pieces)
    assert set(got) == set(rows["name"].to_pylist())
    assert all(same_bits(got[name], cut(new[name], name)) for name in got)


def test_results_are_written_into_retired_tensors_of_the_same_layout():
    old = {"a": torch.zeros(8, dtype=torch.bfloat16), "b": torch.zeros(4), "c": torch.zeros(2, dtype=torch.complex64)}
    new = {"a": torch.ones(8, dtype=torch.bfloat16), "b": torch.ones(4), "c": torch.ones(2, dtype=torch.complex64)}
    conjugate = torch.full((2,), 3 + 1j, dtype=torch.complex64).conj()
    retired = {"a": torch.full((8,), 7.0, dtype=torch.bfloat16), "b": torch.full((2, 2), 7.0), "c": conjugate}
    got = apply(make(old, new), old, into=retired)
    assert all(same_bits(got[name], new[name]) for name in new)
    assert got["a"] is retired["a"]
    assert got["b"] is not retired["b"]
    assert got["c"] is not conjugate
    for shared in (old["a"], old["a"].view(8)):
        with pytest.raises(DeltaError, match="a of version 2 was to be written over its own base"):
            apply(make(old, new), old, into={"a": shared})
    assert not old["a"].any()


def coded(old: np.ndarray, new: np.ndarray) -> tuple[str, bytes]:
    """Code one chunk, check that it decodes, and tell how it was coded."""
    encoding, payload = codec.encode_chunk(old, new, *scan(old, new))
    body = codec.check(payload)
    if encoding == codec.SPARSE:
        out = old.copy()
        index, moved = codec.decode_sparse(body, len(old), old.dtype)
        out[index] += moved
    else:
        words = codec.decode_words(encoding, body, len(old), old.dtype)
        out = words if encoding == codec.RAW else old ^ words
    assert np.array_equal(out, new)
    return encoding, payload


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 65_535, 65_536, 2**24])
def test_gaps_of_one_to_four_bytes(gap):
    old = np.zeros(2 * gap + 500, np.uint16)
    new = old.copy()
    new[[gap, 2 * gap + 1, len(old) - 1]] = [1, 0xFFFF, 0x8000]
    assert coded(old, new)[0] == codec.SPARSE


@pytest.mark.parametrize("word", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_every_move_of_every_word_size_is_exact(word):
    bits = 8 * np.dtype(word).itemsize
    edges = [2**n + d for n in range(bits) for d in (-1, 0, 1)]
    moves = np.array(sorted({e % 2**bits for e in edges} | {(2**bits - e) % 2**bits for e in edges}), word)
    old = np.zeros(8 * len(moves), word)
    new = old.copy()
    new[::8] = moves
    old += np.arange(len(old)).astype(word)
    new += np.arange(len(old)).astype(word)
    assert coded(old, new)[0] == codec.SPARSE


@pytest.mark.parametrize("word", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("rate", [0.0, 1e-4, 0.004, 0.02, 0.1, 0.5, 1.0])
def test_a_scan_finds_what_a_plain_comparison_finds(word, rate):
    rng = np.random.default_rng(2)
    # Longer than a block, then shorter ones: what one call leaves in the scratch must not matter to the next.
    for size in (2**21 // np.dtype(word).itemsize + 1001, 70_001, 9, 1, 0, 70_008):
        old = rng.integers(0, 256, size * np.dtype(word).itemsize + 1, dtype=np.uint8)
        old = old[1:].view(word)  # not aligned
        new = old + (rng.random(size) < rate).astype(word) * rng.integers(1, 255, size).astype(word)
        fed = io.BytesIO()
        index, moved = scan(old, new, fed.write)
        assert np.array_equal(index, np.flatnonzero(old != new))
        assert np.array_equal(moved, (new - old)[index])
        assert fed.getvalue() == new.tobytes()


def test_all_encodings_occur_and_the_shortest_is_taken():
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 50_000, dtype=np.uint16)
    toggled = old ^ 1  # one bit everywhere: a constant for XOR, both signs for differences
    moved = np.where(rng.random(len(old)) < 0.03, old + 1, old).astype(np.uint16)
    other = rng.integers(0, 2**16, 50_000, dtype=np.uint16)
    assert coded(old, toggled)[0] == codec.XOR
    assert coded(old, other) == (codec.RAW, codec.raw_chunk(other.view(np.uint8)))
    encoding, payload = coded(old, moved)
    assert encoding == codec.SPARSE
    assert len(payload) < 0.02 * old.nbytes


@pytest.mark.parametrize("rate", [0.003, 0.01, 0.03, 0.05])
def test_bytes_stay_near_the_entropy_of_positions_and_values(rate):
    rng = np.random.default_rng(1)
    old = torch.randn(2**21, generator=torch.Generator().manual_seed(1)).bfloat16()
    bits = raw_bytes(old).view(np.uint16)
    # An optimiser step moves a bfloat16 by one unit in the last place either way, now and then by two.
    steps = rng.choice(np.array([-2, -1, 1, 2]), bits.size, p=[0.03, 0.47, 0.47, 0.03])
    moved = np.where(rng.random(bits.size) < rate, bits + steps, bits).astype(np.uint16)
    new = from_bytes(moved.view(np.uint8), torch.bfloat16, tuple(old.shape))
    rows = make({"w": old}, {"w": new})
    p = encode_and_digest(2, 1, "r", {"w": old}, {"w": new}).changed_fraction
    position_bits = -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p
    value_bits = -sum(q * math.log2(q) for q in (0.03, 0.47, 0.47, 0.03))
    entropy_bytes = p * old.numel() * (position_bits + value_bits) / 8
    assert sum(len(x) for x in rows["data"].to_pylist()) <= 1.15 * entropy_bytes


def test_nothing_changed_gives_no_rows():
    tensors = {"a": torch.tensor([float("nan"), -0.0]), "empty": torch.empty(0, 3), "scalar": torch.tensor(1.0)}
    rows = make(tensors, {name: t.clone() for name, t in tensors.items()})
    assert rows.num_rows == 0
    assert rows.schema == records.TABLES["weight_deltas"]
    assert apply(rows, tensors) == {}
    assert encode_and_digest(2, 1, "r", tensors, tensors).changed_fraction == 0.0
    assert encode_and_digest(2, 1, "r", {}, {}).changed_fraction == 0.0
    assert full_bytes(tensors) == 12


def test_large_tensors_are_cut_into_bounded_chunks_and_encoding_is_repeatable():
    old = {"w": torch.zeros(9 * MIB, dtype=torch.bfloat16).reshape(9, MIB)}
    new = {"w": old["w"].clone()}
    new["w"][8, MIB - 1] = -0.0
    rows = make(old, new)
    assert rows["length"].to_pylist() == [16 * MIB, 2 * MIB]
    assert rows["offset"].to_pylist() == [0, 16 * MIB]
    assert same_bits(apply(rows, old)["w"], new["w"])
    assert make(old, new).equals(rows)


def test_non_contiguous_tensors():
    old = {"w": torch.arange(12.0).reshape(3, 4).t()}
    new = {"w": (old["w"] + 1)[:, :]}
    assert same_bits(apply(make(old, new), old)["w"], new["w"].contiguous())


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    old, new = {}, {}
    for name in ("a", "b"):
        bits = rng.integers(0, 2**16, 1024, dtype=np.uint16)
        after = bits + (rng.random(1024) < 0.2).astype(np.uint16)
        after[256:512] = bits[256:512] ^ 1
        after[512:768] = rng.integers(0, 2**16, 256)
        old[name] = from_bytes(bits.view(np.uint8), torch.bfloat16, (4, 256))
        new[name] = from_bytes(after.view(np.uint8), torch.bfloat16, (4, 256))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "CHUNK_BYTES", 512)
        rows = make(old, new)
    # Every decoder meets bad rows; the altered ones below are chunk 1.
    assert rows["encoding"].to_pylist() == 2 * [codec.SPARSE, codec.XOR, codec.RAW, codec.SPARSE]
    assert set(apply(rows, old)) == {"a", "b"}
    return old, new, rows


def put(rows: pa.Table, index: int, **values) -> pa.Table:
    listed = rows.to_pylist()
    listed[index].update(values)
    return pa.Table.from_pylist(listed, schema=rows.schema)


def outcome(rows: pa.Table, old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | str:
    try:
        return apply(rows, old)
    except DeltaError as err:
        return str(err)


@pytest.mark.parametrize("pieces", [None, {"a": Piece("a", 1, 0, 0)}], ids=["complete", "empty piece"])
def test_every_flipped_bit_of_every_payload_is_refused_by_name(case, pieces):
    old, _, rows = case
    rows = rows.slice(0, 4)
    base = {"a": old["a"] if pieces is None else old["a"][:, :0]}
    for index in range(4):
        data = rows["data"][index].as_py()
        for bit in range(0, 8 * len(data), 1 if pieces is None else 13):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DeltaError, match=f"a, chunk {index} of version 2 cannot be applied: .* check at their"):
                apply(put(rows, index, data=bytes(flipped)), base, pieces)


def test_every_truncation_and_extension_is_refused(case):
    old, _, rows = case
    for index in range(3):
        data = rows["data"][index].as_py()
        for bad in [data[:n] for n in range(len(data))] + [data + b"\0", data + data]:
            with pytest.raises(DeltaError, match=f"a, chunk {index} of version 2 cannot be applied"):
                apply(put(rows, index, data=bad), old)


def sealed(body: bytes, encoding: str = codec.XOR) -> dict:
    """A row's payload with a correct check, as only a writer with a fault could make it."""
    return {"encoding": encoding, "data": body + blake3(body).digest(16)}


def packed(count: int, first: int, second: int, *parts: bytes, lengths: list[int] | None = None) -> bytes:
    lengths = [len(part) for part in parts[: first + second]] if lengths is None else lengths
    return struct.pack(f"<IBB{len(lengths)}I", count, first, second, *lengths) + b"".join(parts)


def frame(plane: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(plane)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"encoding": "rle"}, "a, chunk 1 .*'rle' is unknown"),
        ({"encoding": codec.SPARSE}, "a, chunk 1 .*0 bytes of signs for 256 changes"),
        ({"encoding": codec.RAW}, "a, chunk 1 .* but the chunk has 512"),
        ({"shape": [256, 4]}, r"a, chunk 1 .*is for bfloat16\[256, 4\], but chunk 0 is for bfloat16\[4, 256\]"),
        ({"dtype": "float16"}, "a, chunk 1 .*is for float16"),
        ({"digest": "0" * 64}, "a, chunk 1 .*another digest"),
        ({"chunk": 0}, "a, chunk 0 .*appears twice"),
        ({"chunk": 9}, "a, chunk 2 .*chunk 1 is missing"),
        ({"offset": 30}, "a, chunk 1 .*go on at 512"),
        ({"length": 511}, "a, chunk 1 .*covers 511 bytes"),
        ({"length": 0}, "a, chunk 1 .*covers 0 bytes"),
        ({"length": -2}, "a, chunk 1 .*covers -2 bytes"),
        ({"version": 3}, "are mixed"),
        ({"base_version": 0}, "are mixed"),
        ({"run": "other"}, "are mixed"),
        ({"data": b""}, "a, chunk 1 .*its 0 bytes do not agree with the check"),
        (sealed(b""), "less than its header of 6"),
        (sealed(packed(256, 0, 1, lengths=[])), "less than its header of 10"),
        (sealed(packed(257, 0, 0)), "asks for 257 numbers .* at most 256"),
        (sealed(packed(256, 0, 3, lengths=[1, 1, 1])), r"0 \+ 3 planes, but at most 256 in 0 \+ 2 are possible"),
        (sealed(packed(256, 1, 0, bytes(256))), r"1 \+ 0 planes, but"),
        (sealed(packed(256, 0, 1, bytes(99), lengths=[100])), "ends 1 bytes before a plane does"),
        (sealed(packed(256, 0, 1, frame(bytes(255)))), "announces 255 bytes, but the header says 256"),
        (sealed(packed(256, 0, 1, frame(bytes(257)))), "announces 257 bytes, but the header says 256"),
        (sealed(packed(256, 0, 1, frame(bytes(2**30)))), "announces 1073741824 bytes"),
        (sealed(packed(256, 0, 1, bytes(50))), "zstd cannot read a plane"),
        (sealed(packed(256, 0, 1, frame(bytes(range(256)))[:-1])), "zstd cannot read a plane"),
        (sealed(packed(255, 0, 0)), "255 words of XOR and 0 bytes more, but the chunk has 256 words"),
        (sealed(packed(256, 0, 0, b"x")), "256 words of XOR and 1 bytes more"),
        (sealed(packed(256, 0, 1, bytes(256))), "the result has digest"),
        (sealed(packed(1, 1, 0, b"\3", b"\0"), codec.SPARSE), "the result has digest"),
        (sealed(packed(1, 1, 0, b"\3", b"\0\0"), codec.SPARSE), "2 bytes of signs for 1 changes"),
        (sealed(packed(1, 2, 0, b"\0", b"\1", b"\0"), codec.SPARSE), "changes element 256, but the chunk has 256"),
        (sealed(packed(257, 1, 0, bytes(257), bytes(33)), codec.SPARSE), "asks for 257 numbers"),
        (sealed(packed(1, 5, 0, lengths=[1] * 5), codec.SPARSE), r"5 \+ 0 planes, but at most 256 in 4 \+ 2"),
        (sealed(bytes(511), codec.RAW), "holds 511 bytes, but the chunk has 512"),
    ],
)  # fmt: skip
def test_altered_rows_are_refused_by_name(case, row, message):
    old, _, rows = case
    with pytest.raises(DeltaError, match=message):
        apply(put(rows, 1, **row), old)


def test_altered_layouts_are_refused_before_memory_is_taken():
    rows = make({}, {"w": torch.zeros(8)})
    assert rows["encoding"].to_pylist() == [codec.RAW]
    for fault, message in (
        ({"shape": [2**40], "length": 2**42}, "fewer bytes in its rows"),
        ({"shape": [-8]}, r"has shape \[-8\]"),
        ({"shape": [9]}, "chunks cover 32 of 36 bytes"),
        ({"dtype": "float99"}, "'float99', which torch .* lacks"),
        ({"dtype": "nn"}, "'nn', which torch .* lacks"),
    ):
        with pytest.raises(DeltaError, match=message):
            apply(put(rows, 0, **fault), {})


def test_missing_and_duplicate_rows_are_refused(case):
    old, _, rows = case
    for index in range(4):
        rest = [i for i in range(rows.num_rows) if i != index]
        with pytest.raises(DeltaError, match=f"(chunk {index} is missing|chunk {index} of version 2 is missing)"):
            apply(rows.take(rest), old)
        with pytest.raises(DeltaError, match=f"chunk {index} of version 2 appears twice"):
            apply(rows.take([*range(rows.num_rows), index]), old)


def test_a_wrong_base_is_refused(case):
    old, new, rows = case
    with pytest.raises(DeltaError, match="the base is not version 1"):
        apply(rows, {**old, "b": new["b"]})
    with pytest.raises(DeltaError, match=r"\['b'\] of the delta are not in the base"):
        apply(rows, {"a": old["a"]})
    with pytest.raises(DeltaError, match=r"a, chunk 0 .* is for bfloat16\[4, 256\], but the base is float32"):
        apply(rows, {name: t.float() for name, t in old.items()})
    with pytest.raises(DeltaError, match=r"the base is bfloat16\[256, 4\]"):
        apply(rows, {name: t.reshape(256, 4) for name, t in old.items()})
    with pytest.raises(records.SchemaError):
        apply(rows.drop_columns(["digest"]), old)


def test_a_wrong_piece_is_refused(case):
    old, _, rows = case
    half = {name: t[:, :128] for name, t in old.items()}
    pieces = {name: Piece(name, 1, 0, 128) for name in old}
    assert set(apply(rows, half, pieces)) == set(old)
    with pytest.raises(DeltaError, match=r"which piece of tensors \['b'\]"):
        apply(rows, half, {"a": pieces["a"]})
    with pytest.raises(DeltaError, match=r"is for bfloat16\[4, 128\], but the base is bfloat16\[4, 256\]"):
        apply(rows, old, pieces)
    for dim, start, stop in ((2, 0, 1), (-1, 0, 1), (1, 0, 257), (1, -1, 3), (1, 5, 4)):
        with pytest.raises(DeltaError, match=r"does not lie in shape \[4, 256\]"):
            apply(rows, half, {**pieces, "a": Piece("a", dim, start, stop)})
    # A piece that is the complete tensor is verified although others could not be.
    with pytest.raises(DeltaError, match=r"a, .*the result has digest"):
        apply(rows, {**half, "a": old["a"] + 1}, {**pieces, "a": Piece("a", 0, 0, 4)})


def test_encode_needs_every_digest(case):
    old, new, _ = case
    with pytest.raises(DeltaError, match=r"no digest for tensors \['b'\]"):
        encode(2, 1, "r", old, new, {"a": "0" * 64})
