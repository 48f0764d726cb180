"""Device memory that a launch needs beside its operands: sums of k splits, and counters of who has arrived.

The sums belong to one launch. They come from torch's caching allocator, on the stream of the launch, and are
given back as soon as the launch is queued, as temporaries of torch's own operators are: what gets that memory
next is behind the launch on the stream. So threads that share a stream share no sums, memory goes to
the pool of a graph that is captured or warmed up, and nothing accumulates.

Counters are zeros when a launch begins, and it zeroes them again. One small block for each stream serves its
launches, which follow each other. It comes from the stream's own memory and is zeroed on the stream, so that
what was queued before for that memory is done before. CUDA graphs have no block, nor have streams that may
end and come back under the same handle: each of their launches has counters of its own, which it zeroes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Bytes of which a lent workspace starts at a multiple, as what cudaMalloc gives does: kernels read partial
#: sums in vectors of 16, Triton's descriptors lie at 128, and cuBLAS wants 256.
WORKSPACE_ALIGNMENT = 256
#: More is asked by no candidate: what ships needs 53 MB at most, a space's candidates 85 MB, and cuBLASLt's
#: algorithms are allowed as much by its space.
MAX_WORKSPACE_BYTES = 256 << 20
#: Bytes of the counters of a stream. Kernels need under 5 kB; beyond that, each launch zeroes its own.
_BLOCK_BYTES = 16384
#: cudaStreamPerThread, which is another stream in each thread.
_PER_THREAD = 2


class Workspace:
    """The device memory of a launcher: `partial_bytes` that a launch writes before it reads them, then
    `counter_bytes` that are zeros when a launch begins and when it ends.

    A caller may lend memory of its own. All launches then share it, whatever their stream: they must follow
    each other.
    """

    def __init__(self, partial_bytes: int, counter_bytes: int, index: int) -> None:
        """index: of the device."""
        self.partial_bytes = partial_bytes
        self.counter_bytes = counter_bytes
        self._index = index
        self._lent: tuple[int, int, None] | None = None
        self._has_block = counter_bytes <= _BLOCK_BYTES

    @property
    def num_bytes(self) -> int:
        """Size of what may be lent."""
        return self.partial_bytes + self.counter_bytes

    @functools.cached_property
    def _torchs(self) -> tuple[Callable[[int], Any], Callable[[], bool]]:
        """Torch is imported by who launches, not by who asks for sizes."""
        import torch

        return _allocation(self._index), torch.cuda.is_current_stream_capturing

    def lend(self, address: int | None) -> None:
        """Use `num_bytes` at an address from now on, whose counters are zeros; None: use its own memory."""
        self._lent = None if address is None else (address, address + self.partial_bytes, None)

    def take(self, stream: int) -> tuple[int, int, torch.Tensor | None]:
        """Where sums and zeroed counters are, for one launch that comes next on the current stream.

        stream: CUDA's handle of that stream. A caller holds what comes third until the launch is queued: with
        it the memory goes back.
        """
        if self._lent is not None:
            return self._lent
        allocate, capturing = self._torchs
        is_captured = capturing()
        if stream == _PER_THREAD and not is_captured:
            allocate = functools.partial(_for_this_thread, self._index)
        counters = 0
        if self.counter_bytes:
            # A replay of a graph may be beside anything, and so may a stream that took an ended one's handle.
            if is_captured or not self._has_block or not (counters := _block(self._index, stream)):
                memory = allocate(self.num_bytes)
                memory[self.partial_bytes :].zero_()
                start = memory.data_ptr()
                return start, start + self.partial_bytes, memory
            if not self.partial_bytes:
                return counters, counters, None
        memory = allocate(self.partial_bytes)
        return memory.data_ptr(), counters, memory


def exceeded_workspace(workspace: Workspace | None) -> str | None:
    """Why a candidate cannot have its workspace; None where it can."""
    if workspace is None or workspace.num_bytes <= MAX_WORKSPACE_BYTES:
        return None
    return f"workspace {workspace.num_bytes} B > {MAX_WORKSPACE_BYTES} B, the most that a launch may take"


@functools.cache
def _allocation(index: int) -> Callable[[int], Any]:
    """Memory of so many bytes on a device, by torch's caching allocator on the current stream."""
    import torch

    place, byte = torch.device("cuda", index), torch.uint8
    # What torch.compile's code calls: half the host time of torch.empty, but on the current device only.
    quick = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
    current: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
    if quick is None or current is None:
        return lambda num_bytes: torch.empty(num_bytes, dtype=byte, device=place)

    def allocate(num_bytes: int) -> Any:
        if current() == index:
            return quick((num_bytes,), (1,), byte)
        return torch.empty(num_bytes, dtype=byte, device=place)

    return allocate


def _for_this_thread(index: int, num_bytes: int) -> Any:
    """Memory for this thread's own stream. Torch takes those of all threads for one, and would give it to
    another thread while it is in use: so it is the default stream's, which these streams wait for, and which
    has it back once a mark that this thread's stream leaves behind the launch is reached.
    """
    import torch

    stream = torch.cuda.current_stream(index)
    with torch.cuda.stream(torch.cuda.default_stream(index)):
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=stream.device)
    memory.record_stream(stream)
    return memory


_blocks: dict[tuple[int, int], torch.Tensor] = {}
_addresses: dict[tuple[int, int], int] = {}
_making = threading.Lock()


def _block(index: int, stream: int) -> int:
    """The address of the counters of the current stream of a device, whose handle this is; 0 for none."""
    address = _addresses.get((index, stream))
    return _make_block(index, stream) if address is None else address


def _make_block(index: int, stream: int) -> int:
    import torch

    current = torch.cuda.current_stream(index)
    if current.cuda_stream != stream or not _is_lasting(current.stream_id):
        return 0
    with _making:
        if (address := _addresses.get((index, stream))) is not None:
            return address
        if (block := _made_on(current)) is None:
            return 0
        _blocks[index, stream] = block
        # Seen by others from now on; what they queue on the stream comes behind the zeros.
        _addresses[index, stream] = address = block.data_ptr()
        return address


def _is_lasting(stream_id: int) -> bool:
    """Whether a stream is the default one or of torch's pool, whose number is odd: they last, while another
    one may end, with its work still queued, and the next one have its handle, or be another stream in each
    thread. Torch's number of such a stream is its handle, which is even.
    """
    return stream_id == 0 or stream_id % 2 == 1


def _made_on(stream: Any) -> Any:
    """A block of a stream's memory, zeroed on it; None where no thread can be started, as at exit.

    By another thread: this one's allocations may go to a pool of torch.compile's, in which nothing may stay,
    or of the user's, and modes may look on.
    """
    made: list[Any] = []

    def make() -> None:
        import torch

        try:
            with torch.cuda.stream(stream):
                made.append(torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device=stream.device))
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=make, name="tunegemm-counters")
    try:
        thread.start()
    except RuntimeError:
        return None
    thread.join()
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]
