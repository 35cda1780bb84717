"""The consumer without a GPU: its own Python classes, over an arena in host memory with the native one's manners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddo_vmm_allocator import model_arena_adapter
from ddo_vmm_allocator.native import NativeModelArenaInfo, NativeVmmError
from safetensors.torch import save_file
from torch import nn

PAGE = 4096
POISON = 0xA5


class HostArena:
    """Ranges are resident within a budget; the last ones in it go first, and what goes is poisoned."""

    def __init__(self, size: int, budget: int, page_size: int = PAGE) -> None:
        self.memory = torch.full((size,), POISON, dtype=torch.uint8)
        self.budget = budget
        self.backing = "device"
        self.page_size = page_size
        self.closed = False
        self.resident: dict[tuple[int, int], int] = {}
        self.pins: dict[tuple[int, int], int] = {}
        self._generation = 0

    @property
    def info(self) -> NativeModelArenaInfo:
        used = sum(size for _, size in self.resident)
        return NativeModelArenaInfo(
            self.memory.data_ptr(), self.memory.numel(), self.page_size, used, self.memory.numel()
        )

    @property
    def residency_counters(self) -> dict[str, int]:
        return {"pressure_evictions": 0}

    def fault_range(self, offset: int, size: int) -> int:
        place = (offset, size)
        if place not in self.resident:
            self._make_room(size)
            self._generation += 1
            self.resident[place] = self._generation
        self.pins[place] = self.pins.get(place, 0) + 1
        return self.resident[place]

    def unpin_range(self, offset: int, size: int) -> None:
        assert self.pins[offset, size] > 0
        self.pins[offset, size] -= 1

    def peek_range_signature(self, offset: int, size: int) -> int | None:
        return self.resident.get((offset, size))

    def prepare_view_range(self, offset: int, size: int) -> None:
        pass

    release_view_range = prepare_view_range

    def close(self) -> None:
        self.closed = True

    def _make_room(self, size: int) -> None:
        while sum(each for _, each in self.resident) + size > self.budget:
            idle = [place for place in self.resident if not self.pins.get(place)]
            if not idle:
                raise NativeVmmError("model arena admission boundary reached by resident capacity")
            offset, length = max(idle)
            del self.resident[offset, length]
            self.memory[offset : offset + length] = POISON


class HostRing:
    """Slots that files are read into; copies are done at once."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.buffers = [np.zeros(slot_bytes, np.uint8) for _ in range(slots)]
        self.reads = self.bytes_read = 0
        self.closed = False
        self.waited_for: list[int] = []

    @property
    def source_stats(self) -> dict[str, int]:
        return {"workers": 1, "read_chunks": self.reads, "read_bytes": self.bytes_read, "read_failures": 0}

    def slot_ready(self, slot: int) -> bool:
        return True

    def wait_slot(self, slot: int) -> None:
        pass

    wait_file_read = wait_slot

    def read_file_async(self, slot: int, path: str, offset: int, *, size_bytes: int) -> None:
        with Path(path).open("rb") as file:
            file.seek(offset)
            self.buffers[slot][:size_bytes] = np.frombuffer(file.read(size_bytes), np.uint8)
        self.reads += 1
        self.bytes_read += size_bytes

    def copy_ticket_to_arena_async(
        self, ranges: Sequence[tuple[int, int, int]], arena: HostArena, *, stream: Any
    ) -> None:
        for slot, offset, size in ranges:
            arena.memory[offset : offset + size] = torch.from_numpy(self.buffers[slot][:size])

    def wait_slot_async(self, slot: int, *, stream: Any) -> None:
        self.waited_for.append(slot)

    def close(self) -> None:
        self.closed = True


class HostFile:
    """A source file, as the consumer reads it for weights that find no room in the arena."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def read_into(self, memory: bytearray, offset: int) -> None:
        with self.path.open("rb") as file:
            file.seek(offset)
            assert file.readinto(memory) == len(memory)

    def close(self) -> None:
        pass


class HostLibrary:
    """Makes the above in place of CUDA's."""

    def create_model_arena(self, size: int, *, resident_budget_bytes: int, page_size_bytes: int, **_: Any) -> HostArena:
        return HostArena(size, resident_budget_bytes, page_size_bytes or PAGE)

    def create_host_ring(self, slot_bytes: int, slots: int, **_: Any) -> HostRing:
        return HostRing(slot_bytes, slots)

    def open_source_file(self, path: str) -> HostFile:
        return HostFile(path)

    def windows_memory_info(self, device: int) -> None:
        raise NativeVmmError("not Windows")


class HostStream:
    """A stream that is always done."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1

    def wait_event(self, event: Any) -> None:
        assert event.recorded


class HostEvent:
    """An event that is reached as soon as it is recorded."""

    def __init__(self, **_: Any) -> None:
        self.recorded = False

    def record(self, stream: Any) -> None:
        self.recorded = True

    def query(self) -> bool:
        return self.recorded

    def synchronize(self) -> None:
        assert self.recorded


def use_host(patch: pytest.MonkeyPatch) -> None:
    """Let the consumer's classes find streams, events and views where there is no GPU."""
    patch.setattr(torch.cuda, "Stream", HostStream)
    patch.setattr(torch.cuda, "Event", HostEvent)
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda device=None: HostStream())
    patch.setattr(model_arena_adapter, "cuda_uint8_tensor_from_address", _host_view)


def arena_view(native: HostArena, offset: int, size: int) -> torch.Tensor:
    return native.memory[offset : offset + size]


def _host_view(address: int, size: int, *, owner: HostArena, backing: str) -> tuple[torch.Tensor, None]:
    return arena_view(owner, address - owner.memory.data_ptr(), size), None


@dataclass(frozen=True)
class FileSlice:
    path: Path
    offset_bytes: int
    size_bytes: int


class Registry:
    """Where each tensor of a loaded model came from, by address: the consumer's registry."""

    def __init__(self) -> None:
        self._slices: dict[tuple[int, int], FileSlice] = {}

    def bind(self, tensor: torch.Tensor, found: FileSlice) -> None:
        self._slices[tensor.data_ptr(), tensor.nbytes] = found

    def lookup(self, tensor: torch.Tensor) -> FileSlice | None:
        return self._slices.get((tensor.data_ptr(), tensor.nbytes))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Modules outside of blocks before and after, as transformers have; ``order`` says which blocks run."""

    def __init__(self, blocks: int = 6, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 8)
        self.order = list(range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for place in self.order:
            x = self.blocks[place](x)
        return self.head(x)


def slices_of(path: Path) -> dict[str, FileSlice]:
    from splitzip_aio.cache.checkpoint import open_checkpoint

    return {
        tensor.name: FileSlice(path.parent / tensor.file, tensor.offset, tensor.nbytes)
        for tensor in open_checkpoint(path).tensors
    }


@dataclass
class Consumer:
    """A model that lives in an arena, its weights in ``directory``."""

    directory: Path
    model: Net
    registry: Registry
    x: torch.Tensor
    expected: Callable[[Sequence[int]], torch.Tensor]
    store: Any = None
    adapter: Any = None
    shards: list[Path] = field(default_factory=list)

    def attach(
        self, budget: int, *, library: Any | None = None, slot_bytes: int = 16 << 10, page_bytes: int = 0
    ) -> None:
        """Hand the weights over to an arena with room for ``budget`` bytes, in host memory or of a real library."""
        report, self.store = model_arena_adapter.attach_model_linear_modules(
            self.model,
            library or HostLibrary(),
            module_pattern=".*",
            resident_budget_bytes=budget,
            page_size_bytes=page_bytes,
            file_slices=self.registry,
            native_transport_slot_size_bytes=slot_bytes,
            native_transport_slots=16,
        )
        self.adapter = report.adapter
        if library is not None:
            self.model.to(self.x.device)  # the rest of it
            return
        for binding in self.bindings():  # views in host memory are taken for weights that could not be moved
            binding.file_slice = self.registry.lookup(binding.source)
            assert binding.file_slice is not None

    def bindings(self) -> list[Any]:
        return [binding for unit in self.adapter._execution_units for binding in unit.tensors]

    def run(self, order: Sequence[int] | None = None) -> None:
        """One pass, whose output must be that of the model as it was loaded."""
        self.model.order = list(range(len(self.model.blocks)) if order is None else order)
        with torch.no_grad():
            assert torch.equal(self.model(self.x), self.expected(self.model.order))

    def close(self) -> None:
        self.adapter.close()
        self.store.close()


@contextmanager
def consumer(directory: Path, *, blocks: int = 6, width: int = 32, device: str = "cpu") -> Iterator[Consumer]:
    """A model, loaded from two shards, and not attached yet."""
    torch.manual_seed(7)
    model = Net(blocks, width)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)  # no two weights are equal
    model = model.bfloat16()
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    names = sorted(tensors)
    shards = [directory / f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for shard, part in zip(shards, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, shard)
    registry = Registry()
    places = slices_of(shards[0]) | slices_of(shards[1])
    for name, parameter in model.named_parameters():
        registry.bind(parameter, places[name])
    model._ddo_safetensor_slices = registry
    reference = Net(blocks, width).bfloat16()
    reference.load_state_dict(tensors)
    reference.to(device)
    x = torch.randn(3, 8).bfloat16().to(device)

    def expected(order: Sequence[int]) -> torch.Tensor:
        reference.order = list(order)
        with torch.no_grad():
            return reference(x)

    opened = Consumer(directory, model, registry, x, expected, shards=shards)
    try:
        yield opened
    finally:
        if opened.adapter is not None:
            opened.close()
