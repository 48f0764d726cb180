"""One chosen kernel for one problem on one device, without database, search or dispatcher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from tunegemm.compile.artifacts import Artifact, ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.epilogue import check_operands
from tunegemm.describe.problem import Problem, operand_dtypes, overlaps_itself
from tunegemm.describe.space import Candidate
from tunegemm.errors import DeviceError, OperationError, ProblemError
from tunegemm.generate import families
from tunegemm.generate.feasibility import Verdict
from tunegemm.generate.launching import Launcher
from tunegemm.generate.workspace import WORKSPACE_ALIGNMENT, Workspace
from tunegemm.measure.operands import torch_dtype

if TYPE_CHECKING:
    import torch

    Stream = torch.cuda.Stream | int


#: How many valid sets of shapes and strides are remembered.
_MAX_KNOWN = 1024


class Operation:
    """A kernel that you chose, as a handle that launches it.

    CUTLASS 3.x calls this the device layer, ``cutlass::gemm::device::GemmUniversalAdapter``: `can_implement`,
    `workspace_bytes` (there ``get_workspace_size``), `initialize` and `run` mean the same; `compile` replaces
    the C++ compiler. All but `initialize` and `run` work without a GPU. docs/guide/operation.md has an
    example.

    Use a handle from one thread at a time, and keep it alive as long as a CUDA graph that captured its
    launches.
    """

    def __init__(
        self,
        problem: Problem,
        candidate: Candidate,
        device: Device | str = "cuda:0",
        *,
        store: ArtifactStore | None = None,
    ) -> None:
        """store: where compiled objects are; by default the user's."""
        for name, value, wanted in (("problem", problem, Problem), ("candidate", candidate, Candidate)):
            if not isinstance(value, wanted):
                raise OperationError(f"{name} {value!r:.40} is not a tunegemm.{wanted.__name__}")
        if not isinstance(device, Device | str):
            raise OperationError(f"device {device!r:.40}: give a tunegemm.Device, or text such as cuda:0")
        self.problem = problem
        self.candidate = candidate
        self.device = find_device(device) if isinstance(device, str) else device
        self._family = families.get(candidate.family)
        self._store = store or ArtifactStore()
        self._artifact: Artifact | None = None
        self._launch: Launcher | None = None
        self._workspace: torch.Tensor | None = None
        """A caller's tensor, which must not be freed."""

    def __repr__(self) -> str:
        """What makes it again."""
        return f"Operation({self.problem!r}, {self.candidate!r}, {self.device.spec!r})"

    def __str__(self) -> str:
        state = "initialized" if self._launch is not None else "not initialized"
        return f"{self._label} for {self.problem} on {self.device.spec}, {state}"

    def can_implement(self) -> Verdict:
        """Whether the kernel can compile and launch for the problem on the device, or why not."""
        if (missing := self._family.unavailable()) is not None and self._family.compiled:
            return Verdict("unavailable", missing)
        if wrong := families.wrong_parameter(self.candidate):
            return Verdict("parameters", wrong)
        return self._family.check(self.problem, self.candidate, self.device)

    def compile(self) -> Resources | None:
        """Compile the kernel in a separate process, unless the object store has it; return its resources.

        Returns None for a library's kernel, whose resources are unknown. Raises OperationError if
        `can_implement` or the compiler refuses.
        """
        self._ensure_feasible()
        if self._artifact is None and self._family.compiled:
            key = self._family.kernel_key(self.problem, self.candidate, self.device)
            with CompilePool(self._store, workers=1) as pool:
                result = pool.submit(self._family.name, key).result()
            if result.artifact is None:
                raise OperationError(f"{self._label} does not compile: {result.failure}")
            self._artifact = result.artifact
        return self._artifact.resources if self._artifact else None

    @property
    def workspace_bytes(self) -> int:
        """Device memory that a launch needs beside its operands, such as for split-K's sums; 0 for none."""
        memory = self._memory
        return 0 if memory is None else memory.num_bytes

    def initialize(self, workspace: torch.Tensor | None = None, *, stream: Stream | None = None) -> None:
        """Load the kernel and zero the counters of the workspace, on `stream` or the current one.

        workspace: a contiguous tensor of any dtype with at least `workspace_bytes` of the device's memory, at
        a multiple of 256 bytes. Every launch then uses it, whatever its stream, so launches must follow each
        other. None: memory from torch's allocator, separate for each stream. Operands that TMA refuses are
        copied in either case.

        Compiles the kernel if needed. You may call it again with another workspace. Raises OperationError for
        a workspace that is too small or not aligned.
        """
        import torch

        if not self.device.is_real:
            raise DeviceError(f"{self.device.spec} is not a GPU; use a device such as 'cuda:0'")
        self.compile()
        memory = self._memory
        lent = self._lent(workspace, memory) if workspace is not None and memory is not None else None
        with self._on(stream):
            if memory is not None:
                memory.lend(None if lent is None else lent.data_ptr())
                if lent is not None:
                    lent[memory.partial_bytes :].zero_()
                else:
                    memory.take(torch.cuda.current_stream().cuda_stream)  # lacking memory is heard now
            if self._launch is None:
                path = self._artifact.path if self._artifact else None
                self._launch = self._family.load(self.problem, self.candidate, self.device, path, memory)
        self._workspace = workspace

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        *operands: Any,
        stream: Stream | None = None,
    ) -> None:
        """Launch the kernel on `stream`, a torch stream or CUDA's handle, or on the current one.

        a is (m, k), b (k, n) and out (m, n) as in torch.matmul, with a batch (l, m, k) and so on, contiguous
        in the problem's majors. Leading dimensions and batch strides are free: 0 gives all entries the same
        matrix, but not for out. operands: those of the problem's epilogue, in order.

        A matrix of the epilogue may be `out` itself. Otherwise nothing that is read may share memory with
        `out` or with an amax, which is also written.

        Raises ProblemError for operands of another problem, on another device, or that share memory;
        ValueError for strides or addresses that the kernel cannot take.
        """
        if self._launch is None:
            raise OperationError(f"{self._label} is not initialized; call initialize() once before run()")
        self._check(a, b, out, operands)
        with self._on(stream):
            self._launch(a, b, out, *operands)

    def _ensure_feasible(self) -> None:
        if not (verdict := self.can_implement()):
            raise OperationError(f"{self.candidate} cannot compute {self.problem}: {verdict}")

    @property
    def _label(self) -> str:
        return self._family.label(self.candidate)

    @cached_property
    def _check(self) -> Checked:
        import torch

        return Checked(self.problem, torch.device("cuda", self.device.index))

    @cached_property
    def _memory(self) -> Workspace | None:
        """The launcher's."""
        self._ensure_feasible()
        return self._family.workspace(self.problem, self.candidate, self.device)

    def _lent(self, workspace: torch.Tensor, memory: Workspace) -> torch.Tensor:
        """The part of a caller's workspace that a launch uses. Raises OperationError if it is unsuitable."""
        import torch

        need, place = memory.num_bytes, torch.device("cuda", self.device.index)
        if not isinstance(workspace, torch.Tensor):
            raise OperationError(f"workspace {workspace!r:.40} is not a tensor; give a tensor on {place}")
        if workspace.device != place:
            raise OperationError(
                f"workspace on {workspace.device}; {self._label} runs on {place}: allocate it there"
            )
        if not workspace.is_contiguous():
            raise OperationError(f"workspace with strides {workspace.stride()}; give a contiguous tensor")
        if workspace.nbytes < need:
            raise OperationError(
                f"workspace of {workspace.nbytes} B; {self._label} needs {need} B, its workspace_bytes"
            )
        if workspace.data_ptr() % WORKSPACE_ALIGNMENT:
            raise OperationError(
                f"workspace at {workspace.data_ptr():#x}, not a multiple of {WORKSPACE_ALIGNMENT} B; "
                "give the start of an allocation"
            )
        return workspace.detach().reshape(-1).view(torch.uint8)[:need]

    def _on(self, stream: Stream | None) -> Any:
        """A context in which the device and the stream are current."""
        import torch

        index = self.device.index
        if stream is None:
            return nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index)
        if isinstance(stream, int):
            stream = torch.cuda.ExternalStream(stream, device=index)
        if stream.device.index != index:
            raise OperationError(f"stream of {stream.device}; {self._label} runs on {self.device.spec}")
        return torch.cuda.stream(stream)


class Extent(NamedTuple):
    """The memory of a view, in bytes from its first element: lines of `line`, multiples of `pitch` apart."""

    span: int
    line: int
    pitch: int
    """0 if there is one line."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Extent:
        size = tensor.element_size()
        steps = [(stride, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)]
        steps = [(stride, extent) for stride, extent in steps if extent > 1 and stride]
        span = 1 + sum(stride * (extent - 1) for stride, extent in steps)
        line = next((extent for stride, extent in steps if stride == 1), 1)
        pitch = math.gcd(*(stride for stride, _ in steps if stride != 1))
        return cls(span * size, line * size, pitch * size)


def share_memory(start: int, extent: Extent, other_start: int, other: Extent) -> bool:
    """Whether two views at these addresses share a byte. Adjacent columns of one buffer share none. For views
    that interleave their lines in other ways, the answer may be a false True.
    """
    if start >= other_start + other.span or other_start >= start + extent.span:
        return False
    pitch = math.gcd(extent.pitch, other.pitch)
    apart = pitch and (other_start - start) % pitch
    return not (extent.line <= apart <= pitch - other.line)


class Checked:
    """The checks of one problem's operands on one device."""

    def __init__(self, problem: Problem, place: torch.device) -> None:
        self._problem, self._place = problem, place
        fused = problem.fused.operands
        self._tensors = tuple(index for index, parameter in enumerate(fused) if parameter.kind != "number")
        self._names = ("a", "b", "out", *(fused[index].name for index in self._tensors))
        self._matrices = {
            3 + number for number, index in enumerate(self._tensors) if fused[index].kind == "matrix"
        }
        self._known: dict[Any, tuple[Extent, ...]] = {}
        #: Pairs of indices: a written operand, and an operand that it must not overlap.
        self._pairs = [(2, other) for other in range(len(self._names)) if other != 2]
        if "amax" in self._names:
            amax = self._names.index("amax")
            self._pairs += [(amax, other) for other in range(len(self._names)) if other not in (2, amax)]

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, operands: Sequence[Any]) -> None:
        """Raises ProblemError if operands belong to another problem or are not on the device, or if one is
        written where another is read. A matrix of the epilogue may be `out` itself.
        """
        check_operands(self._problem.fused, operands)
        value = (a, b, out, *(operands[index] for index in self._tensors))
        try:
            key: tuple[Any, ...] = tuple(
                (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in value
            )
            if len(value) < 3 + len(operands):
                key += tuple(map(type, operands))
        except (AttributeError, TypeError):
            for name, item in zip(self._names, value, strict=True):
                if not hasattr(item, "stride"):
                    wrong = f"{name} {item!r:.40} is not a tensor; {self._problem} needs a tensor on"
                    raise ProblemError(f"{wrong} {self._place}") from None
            raise
        extents = self._known.get(key)
        if extents is None:
            self._check(a, b, out)
            self._check_fused(operands)
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            extents = self._known[key] = tuple(map(Extent.of, value))
        starts = [tensor.data_ptr() for tensor in value]
        for written, other in self._pairs:
            start, other_start = starts[written], starts[other]
            if start < other_start + extents[other].span and other_start < start + extents[written].span:
                self._check_apart(value, written, other, extents)

    def _check(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        p, place = self._problem, self._place
        a_dtype, b_dtype = operand_dtypes(p.in_dtype)
        lead = () if p.batch == 1 else (p.batch,)
        for name, tensor, shape, major, row_major, dtype in (
            ("a", a, (*lead, p.m, p.k), p.a_major, p.a_major == "k", a_dtype),
            ("b", b, (*lead, p.k, p.n), p.b_major, p.b_major == "n", b_dtype),
            ("out", out, (*lead, p.m, p.out_n), p.out_major, p.out_major == "n", p.out_dtype),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != torch_dtype(dtype) or tensor.device != place:
                raise ProblemError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; {p} takes {shape} "
                    f"{torch_dtype(dtype)} on {place}"
                )
            mode = -1 if row_major else -2
            if shape[mode] > 1 and tensor.stride(mode) != 1:
                raise ProblemError(
                    f"{name} has strides {tensor.stride()}; {p} needs it contiguous along {major}"
                )
        if overlaps_itself(out.shape, out.stride()):
            raise ProblemError(
                f"out overlaps itself (strides {out.stride()}); give every element its own place"
            )

    def _check_fused(self, operands: Sequence[Any]) -> None:
        """Check numbers and devices. Launchers check dtypes, shapes and strides (`words_reader`)."""
        for described, value in zip(self._problem.fused.operands, operands, strict=True):
            if described.kind == "number":
                if not isinstance(value, Real):
                    raise ProblemError(f"{described.name} {value!r:.40} is not a number; give a float")
            elif value.device != self._place:
                raise ProblemError(
                    f"{described.name} is on {value.device}; {self._problem} needs it on {self._place}"
                )

    def _check_apart(
        self, tensors: Sequence[torch.Tensor], written: int, other: int, extents: Sequence[Extent]
    ) -> None:
        tensor, two = tensors[written], tensors[other]
        if other in self._matrices and _are_one(tensor, two):
            return
        if share_memory(tensor.data_ptr(), extents[written], two.data_ptr(), extents[other]):
            remedy = " or out itself" if other in self._matrices and written == 2 else ""
            raise ProblemError(
                f"{self._names[other]} shares memory with {self._names[written]}, which the kernel writes; "
                f"give it separate memory{remedy}"
            )


def _are_one(tensor: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two views have the same elements at the same addresses."""
    facts = [(each.data_ptr(), each.dtype, each.shape) for each in (tensor, second)]
    return facts[0] == facts[1] and all(
        extent == 1 or stride == other
        for extent, stride, other in zip(tensor.shape, tensor.stride(), second.stride(), strict=True)
    )
