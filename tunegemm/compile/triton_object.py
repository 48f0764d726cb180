"""Kernels that Triton compiles, as objects of the store: one line of JSON, then the cubin.

Compiling needs no GPU, launching (`tunegemm.generate.triton_launch`) needs neither Triton nor a C compiler.
Both languages of Triton are served: `triton.jit` functions and Gluon's.

A kernel's arguments are scalars (``i32``, ``i64``), pointers (``*fp32``) and tensor maps
(``tensordesc<bf16[1, 128, 64]>``, in Gluon with the shared-memory layout after the shape). The compiler
flattens them into parameters: a tensor map is 128 bytes, then its extents (i32) and strides (i64). Two hidden
pointers come last: global scratch and profile scratch memory. Triton 3.6 and 3.7 follow this convention.
`build` compares it with the parameters in the PTX, so that another convention fails the compile, not the
launch.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tunegemm.compile.ptxas import Resources, output_to, read_report
from tunegemm.describe.device import package_version
from tunegemm.errors import ArtifactError

FORMAT = 2
"""Version of the object file and of the compile options here."""
_TENSOR_MAP = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\]")
_ENTRY = re.compile(r"\.visible \.entry \w+\((.*?)\)", re.DOTALL)


def toolchain() -> dict[str, str | int]:
    """The compiler properties that an object depends on: part of every kernel key."""
    return {"triton": package_version("triton"), "object_format": FORMAT}


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor's encoding, as the compiler chose it."""

    element: str
    """Element type: ``bf16``, ``fp16`` or ``fp32``."""
    box: tuple[int, ...]
    """Extents of one copy, outermost first; narrower than the tile if the smem swizzle is."""
    swizzle: int
    """CUtensorMapSwizzle: 0 none, 1 for 32 B, 2 for 64 B, 3 for 128 B."""


@dataclass(frozen=True)
class Argument:
    """One argument of the kernel, as written in its source."""

    name: str
    type: str
    """``i32``, ``i64``, ``pointer`` or ``tensor_map``."""
    tensor_map: TensorMap | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The types of the parameters that it becomes."""
        if self.tensor_map is None:
            return (self.type,)
        rank = len(self.tensor_map.box)
        return ("tensor_map", *["i32"] * rank, *["i64"] * rank)


@dataclass(frozen=True)
class Header:
    """The facts about the cubin that a launch needs."""

    triton: str
    """Version that compiled it."""
    entry: str
    """Name of the kernel in the cubin."""
    threads: int
    """Threads of one block, the extra warps of warp specialization included."""
    smem_bytes: int
    """Dynamic shared memory of one block."""
    arguments: tuple[Argument, ...]
    """The arguments in the order of the kernel's source, without its constants."""

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The types of all parameters, the two hidden pointers last."""
        return (*[p for argument in self.arguments for p in argument.parameters], "pointer", "pointer")


def write_object(out: Path, header: Header, cubin: bytes) -> None:
    """Write the object file."""
    line = json.dumps({"format": FORMAT} | asdict(header), sort_keys=True)
    out.write_bytes(line.encode() + b"\n" + cubin)


def read_object(content: bytes) -> tuple[Header, bytes]:
    """The parts of an object file. Raises ArtifactError when it is not of this format."""
    line, _, cubin = content.partition(b"\n")
    try:
        data = json.loads(line)
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        arguments = tuple(_argument(**argument) for argument in data.pop("arguments"))
        return Header(**data, arguments=arguments), cubin
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"not a kernel object of this version ({error}); tune again") from None


def _argument(name: str, type: str, tensor_map: dict[str, Any] | None) -> Argument:
    if tensor_map is None:
        return Argument(name, type)
    return Argument(name, type, TensorMap(**tensor_map | {"box": tuple(tensor_map["box"])}))


def build(
    function: Any,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    out: Path,
    *,
    num_warps: int,
    num_stages: int = 1,
    aligned: Sequence[str] | Mapping[str, int] = (),
    max_registers: int | None = None,
    capability: int = 90,
) -> Resources:
    """Compile a jitted function of Triton or Gluon and write its object; the resources are ptxas's report.

    arguments: Triton's type of each run-time argument. Nothing is specialized on their values.
    constants: the values of its `constexpr` parameters.
    aligned: arguments that are promised to be multiples of 16, such as addresses of a workspace, or of
    another number. max_registers: per thread at launch; the default lets one block be resident.

    Raises RuntimeError with the compiler's first error. Runs in a worker process that sees no GPU.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    start = time.perf_counter()
    signature = dict(arguments) | dict.fromkeys(constants, "constexpr")
    promised = aligned if isinstance(aligned, Mapping) else dict.fromkeys(aligned, 16)
    attributes = {
        (function.arg_names.index(name),): [["tt.divisibility", number]] for name, number in promised.items()
    }
    source = _source_type(function)(function, signature, dict(constants), attributes)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        # Triton's own cache is unused: the object store replaces it. Objects have no source paths or lines.
        with triton.knobs.cache.scope(), triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
            triton.knobs.cache.dir = folder
            triton.knobs.nvidia.dump_ptxas_log = True
            triton.knobs.compilation.disable_line_info = True
            try:
                with output_to(log):
                    compiled = triton.compile(
                        source,
                        target=GPUTarget("cuda", capability, 32),
                        options={"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers},
                    )
            except Exception as error:
                raise RuntimeError(first_error(log.read_text()) or f"{_root_cause(error)}") from error
        report = log.read_text()
        ptx, cubin, facts = compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata
    scratch_bytes = facts.global_scratch_size + facts.profile_scratch_size
    if scratch_bytes or facts.num_ctas != 1:
        raise RuntimeError(
            f"needs {scratch_bytes} B of scratch memory and clusters of {facts.num_ctas} CTAs; "
            "launches here have neither"
        )
    maps = iter(facts.tensordesc_meta or ())
    header = Header(
        triton=triton.__version__,
        entry=facts.name,
        threads=facts.num_warps * 32,
        smem_bytes=facts.shared,
        arguments=tuple(_compiled_argument(name, type_name, maps) for name, type_name in arguments.items()),
    )
    if (result := parameters_of(ptx)) != header.parameters:
        raise RuntimeError(f"triton {triton.__version__} passes {result}, expected {header.parameters}")
    write_object(out, header, cubin)
    return read_report(report, smem_bytes=facts.shared, compile_seconds=time.perf_counter() - start)


def build_without_spills(most_registers: int, *arguments: Any, **options: Any) -> Resources:
    """As `build`; if the kernel spills, builds it once more with a limit of `most_registers` a thread.

    ptxas limits some kernels to 80 or 128 registers and spills a few words, so that more blocks are resident:
    `triton` tf32 of 32x64x32 in 4 warps on sm_90 (48 B) and bf16 of 64x32x64 on sm_86 (16 B; Triton 3.6.0).
    With an explicit limit it uses as many registers as it needs.
    """
    resources = build(*arguments, **options)
    return build(*arguments, **options, max_registers=most_registers) if resources.spill_bytes else resources


def _source_type(function: Any) -> Any:
    if function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _compiled_argument(name: str, type_name: str, maps: Any) -> Argument:
    if (match := _TENSOR_MAP.match(type_name)) is not None:
        facts = next(maps)
        box = tuple(facts["block_size"])
        return Argument(name, "tensor_map", TensorMap(match[1], box, facts["swizzle"]))
    return Argument(name, "pointer" if type_name.startswith("*") else type_name)


def parameters_of(ptx: str) -> tuple[str, ...]:
    """Types of the entry's parameters in the PTX."""
    entry = _ENTRY.search(ptx)
    results = []
    for line in entry[1].split(",") if entry else ():
        if ".b8" in line:
            results.append("tensor_map" if "[128]" in line else "bytes")
        elif ".ptr" in line:
            results.append("pointer")
        else:
            results.append({".u32": "i32", ".u64": "i64"}.get(line.split()[1], line.split()[1]))
    return tuple(results)


def first_error(log: str) -> str:
    """The compiler's first complaint, ptxas's before Triton's about it, without the place in our sources."""
    lines = [line.strip() for line in log.splitlines()]
    result = (line for word in ("fatal", "error") for line in lines if re.search(rf"\b{word}\b", line, re.I))
    return re.sub(r"^\S+: (?=error)", "", next(result, ""))


def _root_cause(error: BaseException) -> BaseException:
    """The first error that a Python function of the kernel's language raised; its callers only add lines."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
