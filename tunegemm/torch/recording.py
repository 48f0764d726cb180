"""Counts the products of a program where they reach ATen: eager, autograd, compiled and captured code alike.

While a recording runs, the CPU and CUDA kernels of ATen's matrix products are wrapped (`aten`).
docs/guide/recording.md lists the calls that it cannot see.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch._guards import CompileContext

from tunegemm.choose.operators import OPERATORS
from tunegemm.describe.problem import MAX_ALIGNMENT, alignment_of
from tunegemm.describe.workload import Product, Workload, merge
from tunegemm.describe.workload.products import Kind
from tunegemm.dispatch import api
from tunegemm.dispatch.forms import LINEAR, Form, Operands, Refusal, named
from tunegemm.dispatch.guards import tf32_allowed
from tunegemm.dispatch.library import call_of
from tunegemm.errors import WorkloadError
from tunegemm.files import check_target, impossible
from tunegemm.groups import recorded_groups
from tunegemm.groups.recorded_groups import GroupedCall, dtype_of, mode_of
from tunegemm.torch.aten import replacements
from tunegemm.torch.processes import keep_writing

#: Timed calls per product: enough for a stable median; later calls need no events.
_TIMED = 32
#: Events that may wait for the GPU before finished ones are read.
_PENDING = 256

#: The fields that a kind takes from its problem, beyond the call's form.
_OF_PROBLEM = (
    "m", "n", "k", "batch", "in_dtype", "out_dtype", "a_major", "b_major", "out_major", "alignment",
)  # fmt: skip

_Key = tuple[Any, ...]


class _Asked(NamedTuple):
    """A call's request, apart from its operands."""

    op: str
    """The called operator of ATen, or function of ours."""
    form: Form
    refusal: str = ""
    """Why torch computes such calls whatever the operands; empty if a kernel may serve them."""
    activation: str = "none"


class _Clock:
    """Times one call: between events on the GPU's stream, by the wall clock on a CPU."""

    def __init__(self, operand: torch.Tensor) -> None:
        self.wall_us: float | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if operand.is_cuda:
            self._stream = torch.cuda.current_stream(operand.device)
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record(self._stream)
        self._start_s = time.perf_counter()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record(self._stream)
        else:
            self.wall_us = (time.perf_counter() - self._start_s) * 1e6

    def read(self, *, wait: bool) -> float | None:
        """The time in us. None if the GPU has not reached it yet and `wait` is false."""
        if self._events is None:
            return self.wall_us
        start, end = self._events
        if wait:
            end.synchronize()
        elif not end.query():
            return None
        return start.elapsed_time(end) * 1e3


@dataclass
class _Tally:
    """How often one kind of product was computed."""

    kind: Kind
    calls: int = 0
    captured: int = 0
    replayed: int = 0
    times_us: list[float] = field(default_factory=list)


class Recording:
    """Holds the products computed while it runs; a context manager. See `tunegemm.record`."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._program = tuple(sys.argv)
        self._tallies: dict[_Key, _Tally] = {}
        self._unknown_replays = 0

    def __enter__(self) -> Self:
        if self._path is not None:  # checked now: at the end the products would be lost
            if not self._path.parent.is_dir():
                raise WorkloadError(f"{self._path}: its folder does not exist; create it first")
            check_target(self._path, WorkloadError)
        self._pid = os.getpid()
        _interception.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _interception.remove(self)
        if self._path is not None and os.getpid() == self._pid:  # not a forked child, which ends here, too
            self.workload().write(self._path)

    def clear(self) -> None:
        """Forget all counts."""
        self._tallies = {}
        self._unknown_replays = 0

    @property
    def products(self) -> tuple[Product, ...]:
        """The products computed so far, ordered by their extents."""
        return self.workload().products

    def workload(self) -> Workload:
        """The contents of the file."""
        with _interception.lock:
            products = [
                Product(
                    tally.kind,
                    tally.calls + tally.replayed,
                    tally.replayed,
                    tally.captured,
                    len(tally.times_us),
                    round(statistics.median(tally.times_us), 3) if tally.times_us else None,
                )
                for tally in self._tallies.values()
            ]
        on_gpu = any(product.kind.device == "cuda" for product in products)
        whole = Workload(
            tuple(products),
            torch=torch.__version__,
            device=torch.cuda.get_device_name() if on_gpu else "",
            unknown_replays=self._unknown_replays,
        )
        return merge([whole], self._program)  # kinds may differ only in strides that kernels ignore


def record(path: str | os.PathLike[str] | None = None) -> Recording:
    """Count every matrix product that runs inside ``with tunegemm.record("shapes.json") as recording:``.

    Counts the products of all threads by shape, dtypes, majors, alignment and added term, and times the first
    calls of each. At the end, even after an exception, it writes them to `path`, if given, for ``tunegemm
    tune --from``; `recording.products` has them at any time. Meanwhile `tunegemm.matmul` and `linear` fall
    back to torch, so their products count, too. Raises WorkloadError if the file cannot be written, and
    TunegemmError if this torch cannot record.
    """
    if path is None:
        return Recording()
    if impossible(path) or not str(path):
        raise WorkloadError(f"path {path!r:.60} is not a file name; give one such as shapes.json")
    return Recording(Path(path))


def record_process(folder: str) -> None:
    """Record until the process ends, into a file of its own in a folder, written every few seconds.

    A forked child starts from zero: the products before the fork belong to its parent.
    """
    recording, place, parent = Recording(), Path(folder), os.getpid()
    recording.__enter__()

    def written() -> None:
        workload = recording.workload()
        if workload.products or os.getpid() == parent:
            workload.write(place / f"{os.getpid()}.json")

    def write() -> None:
        with suppress(WorkloadError):
            written()

    def last() -> None:
        _interception.drain(wait=True)
        try:
            written()
        except WorkloadError as error:
            if place.is_dir():  # a process may outlive `tunegemm record`, which deletes its folder
                print(f"tunegemm: products of process {os.getpid()} are lost: {error}", file=sys.stderr)

    keep_writing(write=write, clear=recording.clear, last=last)


class _Interception:
    """The wrapped kernels, while any recording runs."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.recordings: tuple[Recording, ...] = ()
        self._undo = ExitStack()
        self._inside = threading.local()
        self._capturing: list[Any] = []
        """CUDA graphs that are being captured, the latest last."""
        self._graphs: weakref.WeakKeyDictionary[Any, list[_Key]] = weakref.WeakKeyDictionary()
        """What each captured graph computes."""
        self._kinds: dict[_Key, Kind] = {}
        self._timed: Counter[_Key] = Counter()
        """Timed calls since the last recording began."""
        self._pending: deque[tuple[_Clock, _Key, tuple[Recording, ...]]] = deque()
        """Clocks to read, and the recordings that need them."""

    def add(self, recording: Recording) -> None:
        with self.lock:
            if not self.recordings:
                self._install()
            self.recordings += (recording,)
            self._timed.clear()

    def remove(self, recording: Recording) -> None:
        self.drain(wait=True)
        with self.lock:
            self.recordings = tuple(other for other in self.recordings if other is not recording)
            if not self.recordings:
                self._undo.close()

    def forget(self) -> None:
        """After a fork: the child captures and times nothing yet, and none of its threads holds the lock."""
        self.lock = threading.RLock()
        self._capturing.clear()
        self._pending.clear()

    def _install(self) -> None:
        operators = *OPERATORS, *recorded_groups.OPERATORS
        replacements.put("recording", operators, ("CPU", "CUDA"), self._wrap)
        self._undo.callback(replacements.remove, "recording")
        # While recording, torch computes our own products; each is recorded as the call that it replaces.
        self._undo.callback(api.dispatcher.planner.suspend(self._observe, self._observe_groups))
        if torch.backends.cuda.is_built():
            self._watch_graphs()

    def _wrap(self, name: str, original: Any) -> Callable[..., Any]:
        def kernel(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
            compute = partial(original, keyset, *arguments, **keywords)
            if self._is_apart():
                return compute()
            if name in recorded_groups.OPERATORS:
                return self._observe_groups(GroupedCall.of(name, arguments, keywords), compute)
            (form, a, b, tensors, _, out), refusal = call_of(name, arguments, keywords)
            asked = _Asked(name.strip("_").removesuffix("_v2"), form, refusal)
            if name == "_addmm_activation":
                asked = asked._replace(activation="gelu" if keywords.get("use_gelu") else "relu")

            def describe() -> Callable[[Any], Kind]:
                return partial(kind_of, asked, named(form, a, b, tensors, out), a, b)

            return self._count(asked, a, b, tensors, out, compute, describe)

        return kernel

    def _observe(
        self, form: Form, a: Any, b: Any, tensors: Sequence[Any], out: Any, compute: Callable[[], Any]
    ) -> Any:
        """A call of ours, computed entirely by torch: one product, whatever functions of torch it needs.

        If our kernels cannot compute it, it counts as those functions.
        """
        right = b.t() if form.call == LINEAR and b.ndim == 2 else b
        if self._is_apart() or _refusal(call := named(form, a, right, tensors, out)):
            return compute()
        asked = _Asked(form.name(a), form)
        kind = partial(kind_of, asked, call, a, right)
        return self._count(asked, a, right, tensors, out, compute, lambda: kind)

    def _observe_groups(self, call: GroupedCall, compute: Callable[[], Any]) -> Any:
        """A product of groups, with its gate."""
        if self._is_apart():
            return compute()
        return self._count(call.key, call.a, call.b, call.tensors, None, compute, lambda: call.kind)

    def _is_apart(self) -> bool:
        """Whether the current computation is not a call of the program: Inductor runs candidates while it
        compiles, and some kernels call others."""
        return CompileContext.try_get() is not None or getattr(self._inside, "on", False)

    def _count(
        self, asked: Hashable, a: Any, b: Any, tensors: Sequence[Any], out: Any, compute: Callable[[], Any],
        describe: Callable[[], Callable[[Any], Kind]],
    ) -> Any:  # fmt: skip
        """Count a call and return the result of `compute`.

        describe: describes the operands, before `compute` may change them, and returns what makes the counted
        entry of the result. Equal calls run both once.
        """
        low = (a.data_ptr() | b.data_ptr()) % MAX_ALIGNMENT
        key: _Key = (
            asked, a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, a.device.type, low & -low,
            a.dtype is torch.float32 and tf32_allowed(),
        )  # fmt: skip
        for tensor in (*tensors, out) if out is not None else tensors:
            low = tensor.data_ptr() % MAX_ALIGNMENT
            key += (tensor.shape, tensor.stride(), tensor.dtype, low & -low)
        # Before it is computed, which may give an output another size.
        kind = None if key in self._kinds else describe()
        captured = a.is_cuda and torch.cuda.is_current_stream_capturing()
        clock = None if captured or self._timed[key] >= _TIMED else _Clock(a)
        self._inside.on = True
        try:
            result = compute()
        finally:
            self._inside.on = False
        if clock is not None:
            clock.stop()
        if result is None or 0 in a.shape or 0 in b.shape:  # None: the caller has torch's function
            return result
        with self.lock:
            self._timed[key] += clock is not None
            if kind is not None:
                self._kinds[key] = kind(result)
            for recording in self.recordings:
                tally = recording._tallies.setdefault(key, _Tally(self._kinds[key]))
                tally.calls += not captured
                tally.captured += captured
            if captured and self._capturing:
                self._graphs.setdefault(self._capturing[-1], []).append(key)
            if clock is not None:
                self._pending.append((clock, key, self.recordings))
        if clock is not None and (clock.wall_us is not None or len(self._pending) > _PENDING):
            self.drain(wait=False)
        return result

    def drain(self, *, wait: bool) -> None:
        """Read the finished clocks, or all of them. Not during a capture, which forbids queries of events."""
        with self.lock:
            while self._pending and not self._capturing:
                clock, key, recordings = self._pending[0]
                try:
                    elapsed_us = clock.read(wait=wait)
                except RuntimeError:  # the CUDA context is lost; the counts stay
                    self._pending.clear()
                    return
                if elapsed_us is None:
                    return
                self._pending.popleft()
                for recording in recordings:
                    if key in recording._tallies:
                        recording._tallies[key].times_us.append(elapsed_us)

    def _watch_graphs(self) -> None:
        """Record the products of each CUDA graph at its capture, and count them at each replay."""
        graph_class = torch.cuda.CUDAGraph
        begin, end, replay = graph_class.capture_begin, graph_class.capture_end, graph_class.replay

        def capture_begin(graph: Any, *arguments: Any, **keywords: Any) -> None:
            with self.lock:
                self._graphs[graph] = []
                self._capturing.append(graph)
            try:
                begin(graph, *arguments, **keywords)
            except BaseException:
                self._capturing.remove(graph)
                raise

        def capture_end(graph: Any) -> None:
            try:
                end(graph)
            finally:
                if graph in self._capturing:
                    self._capturing.remove(graph)

        def counted_replay(graph: Any) -> None:
            replay(graph)
            with self.lock:
                content = self._graphs.get(graph)
                for recording in self.recordings:
                    if content is None:
                        recording._unknown_replays += 1
                    for key in content or ():
                        recording._tallies.setdefault(key, _Tally(self._kinds[key])).replayed += 1

        for name, value in (
            ("capture_begin", capture_begin), ("capture_end", capture_end), ("replay", counted_replay)
        ):  # fmt: skip
            self._undo.callback(setattr, graph_class, name, getattr(graph_class, name))
            setattr(graph_class, name, value)


_interception = _Interception()
os.register_at_fork(after_in_child=_interception.forget)


def _refusal(call: Operands | Refusal) -> str:
    """Why torch computes a call; empty if a kernel may compute it."""
    if not isinstance(call, Refusal):
        return call.words_refusal
    return call.reason or "torch broadcasts, converts or resizes one of its tensors, which kernels cannot"


def kind_of(
    asked: _Asked, call: Operands | Refusal, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
) -> Kind:
    """The problem that dispatch would look up; for torch's calls as much of it as can be described."""
    steps, reason = asked.form.epilogue.steps, asked.refusal or _refusal(call)
    if isinstance(call, Operands) and not reason:
        facts = {name: getattr(call.problem, name) for name in _OF_PROBLEM}
    else:
        a_major, b_major = mode_of(a, "m", "k", "k"), mode_of(b, "k", "n", "k")
        facts = {
            "m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1], "batch": a.shape[0] if a.ndim == 3 else 1,
            "in_dtype": dtype_of(a.dtype), "out_dtype": dtype_of(out.dtype),
            "a_major": a_major, "b_major": b_major, "out_major": mode_of(out, "m", "n", "n"),
            "alignment": alignment_of(a, b, a_major, b_major),
        }  # fmt: skip
    return Kind(
        **facts,
        op=asked.op,
        bias="vector" if "bias_n" in steps else "matrix" if "beta_c" in steps else "none",
        activation=asked.activation,
        device=a.device.type,
        epilogue=asked.form.text,
        accumulation=asked.form.accumulation,
        refusal=reason,
    )
