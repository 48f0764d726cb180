"""Device memory that a launch needs beside its operands: partial sums of k splits, and arrival counters.

The sums belong to one launch. They come from torch's caching allocator, on the stream of the launch, and are
freed as soon as the launch is queued, like temporaries of torch's own operators: the memory's next user comes
after the launch on the stream. So threads that share a stream share no sums, the pool of a captured or
warmed-up graph supplies the graph's memory, and nothing accumulates.

Counters are zero when a launch begins, and the launch zeroes them again. Each stream has one small block of
counters for its launches, which run one after another. The block comes from the stream's own memory and is
zeroed on the stream, after any work queued earlier for that memory. CUDA graphs have no block, and neither
have streams that may end and come back under the same handle: each of their launches has its own counters,
which are zeroed first.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Alignment of a lent workspace in bytes, the same as cudaMalloc's: kernels read partial sums in vectors of
#: 16 bytes, Triton's descriptors need 128, and cuBLAS wants 256.
WORKSPACE_ALIGNMENT = 256
#: The most that a candidate may take. Shipped kernels need 53 MB at most, candidates of the search spaces
#: 85 MB, and the cublaslt space allows its algorithms this much.
MAX_WORKSPACE_BYTES = 256 << 20
#: Bytes of a stream's block of counters. Kernels need less than 5 kB; a launch that needs more than a block
#: zeroes its own counters.
_BLOCK_BYTES = 16384
#: cudaStreamPerThread, a handle for a different stream in each thread.
_PER_THREAD = 2


class Workspace:
    """The device memory of a launcher: `partial_bytes` that a launch writes before it reads them, then
    `counter_bytes` that are zero when a launch begins and when it ends.

    A caller may lend its own memory. All launches then share it, on any stream, so they must run one after
    another.
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
        """The size of the memory that a caller may lend."""
        return self.partial_bytes + self.counter_bytes

    @functools.cached_property
    def _torchs(self) -> tuple[Callable[[int], Any], Callable[[], bool]]:
        """torch's allocation and its check for stream capture; imports torch only for launches."""
        import torch

        return _allocation(self._index), torch.cuda.is_current_stream_capturing

    def lend(self, address: int | None) -> None:
        """From now on use `num_bytes` at an address, with zeroed counters; None: use its own memory."""
        self._lent = None if address is None else (address, address + self.partial_bytes, None)

    def take(self, stream: int) -> tuple[int, int, torch.Tensor | None]:
        """The addresses of sums and of zeroed counters, for the next launch on the current stream.

        stream: CUDA's handle of that stream. The third result owns the memory: the caller must hold it until
        the launch is queued.
        """
        if self._lent is not None:
            return self._lent
        allocate, capturing = self._torchs
        is_captured = capturing()
        if stream == _PER_THREAD and not is_captured:
            allocate = functools.partial(_for_this_thread, self._index)
        counters = 0
        if self.counter_bytes:
            # A graph's replay may run beside any launch, and so may a stream with the handle of an ended one.
            if is_captured or not self._has_block or not (counters := _block(self._index, stream)):
                memory = allocate(self.num_bytes)
                memory[self.partial_bytes :].zero_()
                start = memory.data_ptr()
                return start, start + self.partial_bytes, memory
            if not self.partial_bytes:
                return counters, counters, None
        memory = allocate(self.partial_bytes)
        return memory.data_ptr(), counters, memory


@functools.cache
def tile_counter(index: int) -> Workspace:
    """The memory of a launch's counter of tiles that were drawn, on the device with an index."""
    return Workspace(0, 4, index)


def exceeded_workspace(workspace: Workspace | None) -> str | None:
    """Why a candidate cannot have its workspace; None if it can."""
    if workspace is None or workspace.num_bytes <= MAX_WORKSPACE_BYTES:
        return None
    return f"workspace {workspace.num_bytes} B > {MAX_WORKSPACE_BYTES} B, the most that a launch may take"


@functools.cache
def _allocation(index: int) -> Callable[[int], Any]:
    """A function that allocates bytes on a device from torch's caching allocator, on the current stream."""
    import torch

    place, byte = torch.device("cuda", index), torch.uint8
    # torch.compile's code calls this function: it takes half the host time of torch.empty, but only allocates
    # on the current device.
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
    """Memory for this thread's own stream.

    Torch treats the per-thread streams of all threads as one, and would give the memory to another thread
    while it is in use. So the memory comes from the default stream, which these streams wait for. The default
    stream gets it back once this thread's stream reaches an event recorded after the launch.
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
    """The address of the counters of a device's current stream, whose handle is `stream`; 0 for none."""
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
        # Other threads see the block from here on; whatever they queue on the stream runs after the zeroing.
        _addresses[index, stream] = address = block.data_ptr()
        return address


def _is_lasting(stream_id: int) -> bool:
    """Whether a stream lasts: it is the default stream, or one of torch's pool, whose ids are odd.

    Any other stream may end while its work is still queued, and the next stream may reuse its handle; or the
    handle may mean a different stream in each thread. Torch uses such a stream's handle, which is even, as
    its id.
    """
    return stream_id == 0 or stream_id % 2 == 1


def _made_on(stream: Any) -> Any:
    """A block of a stream's memory, zeroed on the stream; None if no thread can be started, as at exit.

    Another thread allocates it: this thread's allocations may go to a pool of torch.compile, in which nothing
    may stay, or to a pool of the user, and dispatch modes may intercept them.
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
