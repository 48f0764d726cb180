"""Kernel family `cublaslt`: torch.mm and the algorithms of cuBLASLt, timed like any other candidate.

Nothing is compiled: ctypes calls single algorithms of the library that torch has loaded. Only the library
knows which algorithms exist for a problem on a GPU, so `FAMILY.discover` asks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, MAX_ALIGNMENT, Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.generate.cublaslt.names import ADDED
from tunegemm.generate.feasibility import FEASIBLE, Verdict, apply_rules, rows_together, rule
from tunegemm.generate.workspace import Workspace, exceeded_workspace
from tunegemm.resources import data_path

if TYPE_CHECKING:
    from tunegemm.generate.launching import Launcher

#: The parameters that together name one algorithm of cuBLASLt.
ALGORITHM_PARAMETERS = (
    "algo_id", "tile", "stages", "inner_shape", "cluster_shape", "custom_option",
    "split_k", "reduction_scheme", "cta_swizzling", "workspace_bytes",
)  # fmt: skip

#: The baseline of every interleave, as a candidate.
TORCH_MM = Candidate.make("cublaslt", {"algorithm": "torch.mm"})


def is_torch(candidate: Candidate) -> bool:
    """Whether the candidate is a call of torch.mm, which needs no launcher."""
    return candidate.family == "cublaslt" and candidate.params.get("algorithm") == "torch.mm"


def splits_k(candidate: Candidate) -> bool:
    """Whether the candidate is an algorithm of the library that splits k and adds up the parts."""
    if candidate.params.get("algorithm") != "cublaslt":
        return False
    scheme = candidate.params.get("reduction_scheme", "NONE")
    return scheme not in ("NONE", 0) or candidate.params.get("split_k", 1) not in (0, 1)


def reduces_in_16_bits(problem: Problem, candidate: Candidate) -> bool:
    """Whether the candidate adds up k splits in 16 bits: in the output's dtype, or in the output itself.

    Only COMPUTE_TYPE keeps intermediate sums in fp32 (cublasLt.h, cublasLtReductionScheme_t).
    """
    scheme = candidate.params.get("reduction_scheme", "NONE")
    return (
        splits_k(candidate)
        and scheme not in ("NONE", 0, "COMPUTE_TYPE")
        and DTYPE_BYTES[problem.out_dtype] <= 2
    )


@rule("algorithm")
def named_algorithm(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """`heuristic` in the space file stands for many algorithms; it is not an algorithm itself."""
    if (name := candidate.params.get("algorithm")) != "cublaslt":
        return f"algorithm {name!r} is not a single kernel; the library names its own on the GPU"
    return None


@rule(*ALGORITHM_PARAMETERS)
def complete_name(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Only all attributes together name an algorithm of the library."""
    missing = [name for name in ALGORITHM_PARAMETERS if name not in candidate.params]
    if missing:
        return f"parameter {missing[0]!r} of the algorithm is missing"
    numbers = [
        (name, value) for name in ALGORITHM_PARAMETERS if not isinstance(value := candidate[name], str)
    ]
    wrong = [name for name, value in numbers if type(value) is not int or not 0 <= value < 2**31]
    return f"parameter {wrong[0]!r} of the algorithm is not a whole number from 0 on" if wrong else None


@rule("in_dtype", "out_dtype")
def library_dtypes(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """cublasLtMatmul turns 16-bit inputs into their own dtype or fp32 (cuBLASLt, table of supported types).
    Only torch.mm computes products of other inputs."""
    if DTYPE_BYTES[problem.in_dtype] != 2:
        return f"single algorithms are for bf16 and fp16 operands, not for {problem.in_dtype}"
    if problem.out_dtype not in (problem.in_dtype, "fp32"):
        return f"cuBLASLt has no {problem.in_dtype} product with {problem.out_dtype} output"
    return None


@rule("epilogue", "batch", "alignment", "out_major")
def library_epilogue(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """The algorithms compute plain products, products plus a matrix, because cublasLtMatmul can read C and
    write D at different addresses, and those plus a bias of D's contiguous extent, which relu or GELU may
    follow. Torch composes other epilogues from its own operations."""
    if not problem.epilogue:
        return None
    if problem.epilogue not in ADDED:
        return (
            "algorithms add nothing, a residual, or a bias and a residual, relu or gelu_tanh; they have no "
            f"{problem.epilogue}"
        )
    if problem.batch > 1 or problem.alignment != MAX_ALIGNMENT:
        return f"{problem.epilogue} needs a product without a batch, and lines of whole {MAX_ALIGNMENT} B"
    if problem.epilogue != "residual" and problem.out_major != "n":
        return f"a bias along n needs an output whose n is contiguous, not {problem.out_major}"
    return None


@rule(
    "m", "n", "k", "batch", "alignment", "in_dtype", "out_dtype", "a_major", "b_major", "out_major",
    "epilogue",
)  # fmt: skip
def library_alignment(problem: Problem, candidate: Candidate, device: Device) -> str | None:
    """Operands are packed, and each batch entry has the alignment that the heuristic assumes: 16 B."""
    if problem.alignment != problem.packed_alignment:
        return f"alignment {problem.alignment} B, but packed operands have {problem.packed_alignment} B"
    in_bytes, out_bytes = DTYPE_BYTES[problem.in_dtype], DTYPE_BYTES[problem.out_dtype]
    for operand, num_bytes in (
        ("A", problem.m * problem.k * in_bytes),
        ("B", problem.k * problem.n * in_bytes),
        ("D", problem.m * problem.n * out_bytes),
    ):
        if problem.batch > 1 and num_bytes % MAX_ALIGNMENT:
            return f"{operand} batch entries of {num_bytes} B, not a multiple of {MAX_ALIGNMENT} B"
    return None


#: The rules of the library's algorithms; torch.mm has none.
RULES = (
    rows_together, named_algorithm, complete_name, library_dtypes, library_epilogue, library_alignment
)  # fmt: skip


class CublasLt:
    """The vendor's library; `tunegemm.generate.family.Library` documents the members."""

    name = "cublaslt"
    parameters: Mapping[str, tuple[str, ...]] = {
        "compile": ("algorithm",),
        "launch": ("requested", "workspace_mib"),
    }
    compiled: ClassVar[Literal[False]] = False
    tma = False
    edges_inside = False

    @property
    def space_file(self) -> Path:
        return data_path("search_spaces", "cublaslt.toml")

    def unavailable(self, *, launching: bool = False) -> str | None:
        """Why torch.mm is the family's only candidate; None if torch has loaded cuBLASLt."""
        from tunegemm.generate.cublaslt import binding

        return binding.missing()

    def check(self, problem: Problem, candidate: Candidate, device: Device) -> Verdict:
        """Whether the library may have such a kernel. Only `load` shows whether it takes the problem."""
        if is_torch(candidate):
            return FEASIBLE
        if reason := exceeded_workspace(self.workspace(problem, candidate, device)):
            return Verdict("workspace", reason)
        return apply_rules(RULES, problem, candidate, device)

    def discover(self, problem: Problem, device: Device) -> list[Candidate]:
        """torch.mm and, on a real device, the algorithms that the library names for the problem.

        The space file says how many algorithms to request, and the workspaces that they may use.
        """
        candidates = [TORCH_MM]
        space = SearchSpace.load(self.space_file, parameters=self.parameters)
        # The rules that the probe passes do not depend on the algorithm.
        probe = Candidate.make(self.name, {"algorithm": "cublaslt"} | dict.fromkeys(ALGORITHM_PARAMETERS, 0))
        wanted = device.is_real and "heuristic" in space.compile_values["algorithm"]
        if wanted and self.unavailable() is None and self.check(problem, probe, device):
            from tunegemm.generate.cublaslt import library

            limits = itertools.product(space.launch_values["workspace_mib"], space.launch_values["requested"])
            for mib, requested in limits:
                candidates += library.algorithms(problem, device.index, int(requested), int(mib) << 20)
            if not device.architecture.wgmma and not problem.epilogue:
                # On Hopper the heuristic is right often enough; elsewhere what it leaves out is untimed.
                mib = max(int(value) for value in space.launch_values["workspace_mib"])
                candidates += library.one_of_each_id(problem, device.index, mib << 20)
        return list(dict.fromkeys(candidates))

    def reduction_class(self, problem: Problem, candidate: Candidate) -> str:
        """Empty: the algorithm that torch.mm launches depends on m."""
        return ""

    def label(self, candidate: Candidate) -> str:
        """``torch.mm``, or a label such as ``cublaslt a66 t128x256 s64xAUTO c2x1x1``."""
        if candidate["algorithm"] != "cublaslt":
            return str(candidate["algorithm"])
        from tunegemm.generate.cublaslt import library

        return library.label(candidate)

    def workspace(self, problem: Problem, candidate: Candidate, device: Device) -> Workspace | None:
        """The workspace that the library chose the algorithm for; torch.mm uses torch's workspace."""
        num_bytes = int(candidate.params.get("workspace_bytes", 0))
        return Workspace(num_bytes, 0, device.index) if num_bytes else None

    def load(
        self,
        problem: Problem,
        candidate: Candidate,
        device: Device,
        artifact: Path | None,
        workspace: Workspace | None = None,
    ) -> Launcher:
        """A launcher. Raises ValueError if the installed library refuses the stored algorithm."""
        if not (verdict := self.check(problem, candidate, device)):
            raise ValueError(f"{candidate} cannot run: {verdict}")
        if is_torch(candidate):
            from tunegemm.generate.cublaslt.eager import torch_mm

            return torch_mm(problem)
        from tunegemm.generate.cublaslt import library

        workspace = workspace or self.workspace(problem, candidate, device)
        return library.launcher(problem, candidate, device.index, workspace)


FAMILY = CublasLt()
