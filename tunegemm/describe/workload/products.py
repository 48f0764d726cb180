"""A program's recorded products, and the file that stores them; docs/guide/recording.md describes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tunegemm.describe.stored import document_of, fields_from
from tunegemm.errors import BadValueError, WorkloadError
from tunegemm.files import write_text
from tunegemm.untrusted import line, listed, members, number, shown, whole

FORMAT = "tunegemm-shapes"
VERSION = 1
#: Fields of a product that older files lack.
_LATER = ("epilogue", "accumulation", "refusal")
OWN_ACTIVATION = "only torch applies its activation in the same call (_addmm_activation)"
_MOST_CALLS = 2**53
_LONGEST_WORD = 65_536


@dataclass(frozen=True, order=True)
class Kind:
    """One kind of product, of any dtype and strides, without its counts. What has no description is as in a
    `Problem`, but a major is empty if neither mode is contiguous."""

    m: int
    n: int
    k: int
    batch: int
    in_dtype: str
    """Element type of A and B: one of `describe.problem.DTYPE_BYTES`, or torch's name for others."""
    out_dtype: str
    a_major: str
    b_major: str
    out_major: str
    alignment: int
    op: str = "mm"
    """ATen's name of the operator, such as ``addmm``."""
    bias: str = "none"
    """Term that torch adds: ``none``, ``vector`` (one value per column) or ``matrix``."""
    activation: str = "none"
    """``none``, ``relu`` or ``gelu``, where the same operator applies it."""
    device: str = "cuda"
    """Device it ran on: ``cuda`` or ``cpu``."""
    epilogue: str = ""
    accumulation: str = "fast"
    refusal: str = ""
    """Why torch computes it, whatever is tuned; empty if a kernel may."""
    groups: int = 0

    def __post_init__(self) -> None:
        # Files from before 2026-11-26 have only `bias` and `activation`.
        if self.epilogue or self.refusal:
            return
        if self.activation != "none":
            object.__setattr__(self, "refusal", OWN_ACTIVATION)
        elif self.op == "scaled_mm":
            object.__setattr__(self, "refusal", "its scales were not recorded; record it again")
        elif self.op in ("addmm", "baddbmm"):
            steps = {"vector": "bias_n", "matrix": "beta_c"}
            object.__setattr__(self, "epilogue", steps.get(self.bias, ""))

    @property
    def shape(self) -> str:
        """``MxNxK``, with ``xL`` when there is a batch, or the number of groups."""
        more = f" groups{self.groups}" if self.groups else f"x{self.batch}" if self.batch != 1 else ""
        return f"{self.m}x{self.n}x{self.k}{more}"


@dataclass(frozen=True)
class Product:
    """One kind of product and how often a program computed it."""

    kind: Kind
    calls: int
    """Number of runs, including replays of CUDA graphs."""
    replayed: int = 0
    """How many of `calls` were replays of a CUDA graph."""
    captured: int = 0
    """How often it was captured into a CUDA graph, which does not count as a call."""
    timed: int = 0
    """Calls that were timed: the first ones outside capture."""
    median_us: float | None = None
    """Median of the timed calls: between CUDA events on a GPU, by the wall clock on a CPU."""

    @property
    def weight(self) -> int:
        """The number of calls; if only captures were seen, and no replay, the number of captures."""
        return self.calls or self.captured

    @property
    def seconds(self) -> float | None:
        """Total time of all calls if each takes the median."""
        return None if self.median_us is None else self.weight * self.median_us * 1e-6


@dataclass(frozen=True)
class Workload:
    """The products of one run of a program."""

    products: tuple[Product, ...]
    program: tuple[str, ...] = ()
    """Its command line."""
    torch: str = ""
    """Version."""
    device: str = ""
    """Name of the GPU; empty without one."""
    processes: int = 1
    """Number of processes that computed products."""
    unknown_replays: int = 0
    """Replays of CUDA graphs that were captured before the recording began, so that their products are
    unknown."""

    def to_json(self) -> str:
        """The file's text. The same products give the same text."""
        rows = [
            {name: cell for name, cell in asdict(product.kind).items() if name != "groups"}
            | document_of(product.kind)
            | {field.name: getattr(product, field.name) for field in fields(Product)[1:]}
            | {
                "clock": {"cuda": "cuda_events", "cpu": "wall"}.get(product.kind.device, ""),
                "seconds": product.seconds,
            }
            for product in self.products
        ]
        head: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        head |= {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        lines = ",\n".join("    " + json.dumps(row) for row in rows)
        return f'{json.dumps(head, indent=2)[:-2]},\n  "products": [\n{lines}\n  ]\n}}\n'

    def write(self, path: Path) -> None:
        """Replace the file as a whole: a reader sees the old text or the new one. Raises WorkloadError."""
        write_text(path, self.to_json(), WorkloadError)

    @classmethod
    def from_document(cls, document: Any, where: str) -> tuple[Workload, list[str]]:
        """The workload of a parsed file, and a line with number and reason for each invalid product.

        Raises WorkloadError for any other document.
        """
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise WorkloadError(f'{where}: no "format": "{FORMAT}"; write one with `tunegemm record`')
        if (version := document.get("version")) != VERSION:
            raise WorkloadError(
                f"{where}: version {shown(version)} of the format, this tunegemm reads {VERSION}; "
                "record again, or update tunegemm"
            )
        products, refused = [], []
        try:
            for position, row in enumerate(listed(document.get("products"), "`products`"), 1):
                try:
                    products.append(_product(row))
                except BadValueError as error:
                    refused.append(f"product {position}: {error}")
            program = listed(document.get("program", []), "program")
            workload = cls(
                tuple(products),
                tuple(line(word, "a word of program", _LONGEST_WORD) for word in program),
                line(document.get("torch", ""), "torch"),
                line(document.get("device", ""), "device"),
                whole(document.get("processes", 1), "processes"),
                whole(document.get("unknown_replays", 0), "unknown_replays", 0, _MOST_CALLS),
            )
        except BadValueError as error:
            raise WorkloadError(f"{where}: {error}; record it again") from None
        return workload, refused


def _product(row: Any) -> Product:
    names = [field.name for field in (*fields(Kind)[:-1], *fields(Product)[1:])]
    row = members(row, "it", [name for name in names if name not in _LATER], None)
    kind: dict[str, Any] = {name: whole(row[name], name, 1, _MOST_CALLS) for name in ("m", "n", "k", "batch")}
    for field in fields(Kind)[len(kind) : -1]:
        if field.name in _LATER and field.name not in row:
            continue
        read = line if field.type == "str" else whole
        kind[field.name] = read(row[field.name], field.name)
    kind |= fields_from(kind["batch"], kind.get("epilogue", ""))
    counts = {
        name: whole(row[name], name, 0, _MOST_CALLS) for name in ("calls", "replayed", "captured", "timed")
    }
    median = None if row["median_us"] is None else number(row["median_us"], "median_us", 0, 1e12)
    return Product(Kind(**kind), **counts, median_us=median)


def merge(workloads: Sequence[Workload], program: Iterable[str] = ()) -> Workload:
    """Several processes' products as one: counts added, times averaged by the calls that were timed."""
    result: dict[Kind, Product] = {}
    for workload in workloads:
        for product in workload.products:
            result[product.kind] = _sum(result[product.kind], product) if product.kind in result else product
    return Workload(
        tuple(result[kind] for kind in sorted(result)),
        tuple(program) or next((w.program for w in workloads), ()),
        next((w.torch for w in workloads if w.torch), ""),
        next((w.device for w in workloads if w.device), ""),
        sum(w.processes for w in workloads),
        sum(w.unknown_replays for w in workloads),
    )


def _sum(product: Product, other: Product) -> Product:
    timed = product.timed + other.timed
    total = product.timed * (product.median_us or 0.0) + other.timed * (other.median_us or 0.0)
    return replace(
        product,
        calls=product.calls + other.calls,
        replayed=product.replayed + other.replayed,
        captured=product.captured + other.captured,
        timed=timed,
        median_us=total / timed if timed else None,
    )
