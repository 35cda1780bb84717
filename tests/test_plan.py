"""From tensors to reads: every segment once, whole, in bounds, and where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitzip_aio.abc import PlannedRead
from splitzip_aio.cache import Entry
from splitzip_aio.errors import InvalidArgumentError, UnknownLayerError
from splitzip_aio.plan import ExecutionPlan, largest_read_bytes

MANY = 1 << 31


PACKS = [f"{number:05}.szp" for number in range(4)]


def entry(
    name: str, segments: Sequence[int], *, offset: int = 0, pack: int = 0, key: str = "", layer: str = "l"
) -> Entry:
    """An F8 tensor whose segments decode to 4096 bytes each."""
    nbytes = 4096 * len(segments)
    return Entry(
        name=name,
        dtype="F8_E4M3",
        shape=(nbytes,),
        nbytes=nbytes,
        layer=layer,
        key=key or name,
        schedule="stored",
        coverage=None,
        pack=pack,
        offset=offset,
        segments=tuple(segments),
        segment_elements=4096,
    )


def plan(*entries: Entry, slot_bytes: int = 1 << 20, max_segments: int = MANY) -> ExecutionPlan:
    return ExecutionPlan(entries, packs=PACKS, slot_bytes=slot_bytes, max_segments=max_segments)


def places(read: PlannedRead) -> list[tuple[int, int]]:
    return [(read.offset + segment.source, segment.nbytes) for segment in read.segments]


def test_neighbours_become_one_read_of_whole_pages() -> None:
    layer = plan(entry("a", [4288, 320], offset=64), entry("b", [160], offset=64 + 4608)).layer("l")
    (read,) = layer.reads
    assert (read.pack, read.offset, read.nbytes) == (0, 0, 8192)
    assert places(read) == [(64, 4288), (4352, 320), (4672, 160)]
    assert [segment.destination for segment in read.segments] == [0, 4096, 8192]
    assert [segment.tensor for segment in read.segments] == ["a", "a", "b"]
    assert [(tensor.name, tensor.offset) for tensor in layer.tensors] == [("a", 0), ("b", 8192)]
    assert layer.nbytes == 12288


def test_a_read_ends_at_the_slot_the_pack_a_hole_or_the_table() -> None:
    segments = [3200] * 4
    base = entry("a", segments, offset=0)
    assert len(plan(base, slot_bytes=8192).layer("l").reads) == 3  # the second read also has a page of the first
    assert len(plan(base, max_segments=1).layer("l").reads) == 4
    assert len(plan(base, entry("b", [320], offset=12800, pack=1)).layer("l").reads) == 2
    assert len(plan(base, entry("b", [320], offset=16384)).layer("l").reads) == 1
    assert len(plan(base, entry("b", [320], offset=20480)).layer("l").reads) == 2


def test_tied_tensors_share_their_range_and_are_read_once() -> None:
    layer = plan(entry("a", [320], key="x"), entry("b", [320], key="x"), entry("c", [320], offset=320)).layer("l")
    assert [tensor.offset for tensor in layer.tensors] == [0, 0, 4096]
    assert [places(read) for read in layer.reads] == [[(0, 320), (320, 320)]]


def test_tensors_tied_across_layers_are_in_both() -> None:
    tied = plan(entry("a", [320], key="x", layer="m"), entry("b", [320], key="x", layer="n"))
    assert tied.layers == ("m", "n")
    assert places(tied.layer("m").reads[0]) == places(tied.layer("n").reads[0]) == [(0, 320)]
    assert tied.nbytes == 8192


def test_a_layer_of_empty_tensors_has_no_reads_and_some_room() -> None:
    empty = plan(entry("a", []), entry("b", [], key="a"))
    assert empty.layer("l").reads == ()
    assert empty.layer("l").nbytes == 0
    assert empty.nbytes == 256
    assert largest_read_bytes([entry("a", [])]) == 0


def test_layers_are_in_the_order_of_their_first_tensors() -> None:
    mixed = plan(entry("a", [160], layer="z"), entry("b", [160], layer="y"), entry("c", [160], layer="z"))
    assert mixed.layers == ("z", "y")
    assert [tensor.name for tensor in mixed.layer("z").tensors] == ["a", "c"]
    assert mixed.layer("z") is mixed.layer("z")


def test_layer_of_overrides_the_cache() -> None:
    entries = [entry("a.x", [160]), entry("b.x", [160])]
    grouped = ExecutionPlan(
        entries, packs=PACKS, slot_bytes=4096, max_segments=9, layer_of=lambda name: name.split(".")[1]
    )
    assert grouped.layers == ("x",)
    with pytest.raises(InvalidArgumentError, match=r"layer_of.*'a\.x'.*7"):
        ExecutionPlan(entries, packs=PACKS, slot_bytes=4096, max_segments=9, layer_of=lambda name: 7)


def test_unknown_layer_names_what_there_is() -> None:
    with pytest.raises(UnknownLayerError, match=r"no layer 'q'; the cache has 'l0', .* and 3 more"):
        plan(*(entry(f"t{i}", [160], layer=f"l{i}") for i in range(8))).layer("q")


def test_largest_read_counts_the_pages_that_a_segment_touches() -> None:
    assert largest_read_bytes([entry("a", [4096])]) == 4096
    assert largest_read_bytes([entry("a", [4096], offset=32)]) == 8192
    assert largest_read_bytes([entry("a", [64, 4096], offset=4064), entry("b", [32])]) == 8192


@st.composite
def caches(draw: st.DrawFn) -> list[Entry]:
    entries: list[Entry] = []
    ends = [0, 0]
    for number in range(draw(st.integers(1, 8))):
        pack = draw(st.integers(0, 1))
        ends[pack] += 32 * draw(st.sampled_from([0, 0, 1, 200, 1000]))
        segments = [32 * n for n in draw(st.lists(st.integers(5, 400), max_size=6))]
        entries.append(entry(f"t{number}", segments, pack=pack, offset=ends[pack], layer=f"l{draw(st.integers(0, 2))}"))
        ends[pack] += sum(segments)
    return entries


@given(cache=caches(), slack=st.integers(0, 5), max_segments=st.integers(1, 9))
def test_every_segment_is_read_once_and_whole(cache: list[Entry], slack: int, max_segments: int) -> None:
    slot_bytes = max(largest_read_bytes(cache), 4096) + slack * 4096
    planned = ExecutionPlan(cache, packs=PACKS, slot_bytes=slot_bytes, max_segments=max_segments)
    for name in planned.layers:
        layer = planned.layer(name)
        read = []
        for one in layer.reads:
            assert one.offset % 4096 == one.nbytes % 4096 == 0
            assert 0 < one.nbytes <= slot_bytes
            assert 0 < len(one.segments) <= max_segments
            for segment in one.segments:
                assert segment.source >= 0
                assert segment.source + segment.nbytes <= one.nbytes
                assert segment.destination + segment.decoded_bytes <= layer.nbytes
                read.append(
                    (one.pack, one.offset + segment.source, segment.nbytes, segment.tensor, segment.destination)
                )
        starts = {tensor.name: tensor.offset for tensor in layer.tensors}
        assert all(start % 256 == 0 for start in starts.values())
        expected = [
            (extent.pack, extent.offset, extent.nbytes, member.name, starts[member.name] + extent.start)
            for member in cache
            if member.layer == name
            for extent in member.extents()
        ]
        assert sorted(read) == sorted(expected)
