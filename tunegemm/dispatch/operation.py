"""One chosen kernel for one problem on one device, without database, search or dispatcher."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tunegemm.compile.artifacts import Artifact, ArtifactStore
from tunegemm.compile.pool import CompilePool
from tunegemm.compile.ptxas import Resources
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch.checked import Checked
from tunegemm.errors import DeviceError, OperationError
from tunegemm.generate import families
from tunegemm.generate.feasibility import Verdict
from tunegemm.generate.launching import Launcher
from tunegemm.generate.workspace import WORKSPACE_ALIGNMENT, Workspace

if TYPE_CHECKING:
    import torch

    Stream = torch.cuda.Stream | int


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
