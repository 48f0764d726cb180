"""The roofline of a problem and of one candidate for it, the choice of dispatch, and how to change that
choice.

Arithmetic intensity counts twice: *globally*, with every operand moved once through device memory, and *per
tile*, with the bytes that a block loads into shared memory for one step of k. The second bounds a kernel
without an L2; the truth lies between the two. See S. Williams et al., "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, isnan
from typing import TYPE_CHECKING, Any, Literal

from tunegemm.choose.neighbours import Offer
from tunegemm.choose.policies import Policy, read_mode, read_policy, read_switch
from tunegemm.choose.selection import Outcome, Selection, read_rivals, select
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.command import tune_command
from tunegemm.describe.device import Device
from tunegemm.describe.problem import DTYPE_BYTES, Problem
from tunegemm.describe.space import Candidate
from tunegemm.describe.stored import document_of
from tunegemm.errors import (
    ArtifactError,
    DatabaseError,
    DeviceError,
    ProblemError,
    SpaceError,
    named_arguments,
)
from tunegemm.generate import families
from tunegemm.generate.cublaslt import is_torch
from tunegemm.generate.tiles import tile_count
from tunegemm.measure.evidence import STEADY_FINAL, Evidence, leaders
from tunegemm.model.rank import is_memory_bound
from tunegemm.report.space import Space
from tunegemm.report.space import candidate as chosen_candidate
from tunegemm.report.text import significant
from tunegemm.store import Record as StoredRecord
from tunegemm.store.layers import absent, read_records
from tunegemm.store.validity import judge_stored

if TYPE_CHECKING:
    import torch

_EVIDENCE = {
    Evidence.SCREEN: "the search", Evidence.RACE: "an interleaved race",
    Evidence.STEADY: "a qualifying round", Evidence.FINAL: "a final race",
}  # fmt: skip

Bound = Literal["compute", "memory"]


@dataclass(frozen=True)
class TileFacts:
    """One candidate's share of the roofline."""

    candidate: Candidate
    label: str
    verdict: str
    """``feasible``, or the rule that forbids it and why."""
    flops_per_smem_byte: float
    """2 m n k of a tile over the bytes of its A and B tiles: the seed's arithmetic intensity."""
    tile_tflops: float
    """The rate that this intensity allows at the device's memory bandwidth without an L2."""
    tiles: int
    """Work units: output tiles, times k splits."""
    waves: int
    """Number of rounds that the work units take, one block per multiprocessor in each."""
    wave_efficiency: float
    """Work units over waves times multiprocessors: 1 without a tail."""
    smem_bytes: int | None
    """Computed shared memory of a block; None if the candidate is so far from feasible that it has no such
    number."""


@dataclass(frozen=True)
class Explanation:
    """Facts about a problem before and after tuning."""

    problem: Problem
    device: Device
    flops: int
    bytes: int
    """Fewest bytes through device memory."""
    flops_per_byte: float
    """Global arithmetic intensity."""
    ridge_flops_per_byte: float
    """Where the device's two bounds meet: peak over bandwidth."""
    bound: Bound
    roofline_us: float
    """The floor: the larger of arithmetic and memory time at datasheet peaks."""
    roofline_tflops: float
    """The rate at that floor."""
    tile: TileFacts | None
    """How the given candidate, or else the kernel that dispatch would launch, divides the problem; None if
    there are no tiles."""
    outcome: Outcome
    """Outcome of dispatch for the problem: ``hit``, ``predicted``, ``near`` or ``miss``."""
    record: StoredRecord | None
    """The record that dispatch would launch, or from which a near hit takes its kernel; None if torch
    computes, or if the kernel is predicted."""
    offer: Offer | None
    """The expected performance of a kernel that was not measured for this problem: predicted, or near."""
    runner_up: StoredRecord | None
    """The best other measured candidate; None where the database keeps no other measurement of the
    problem, as for shipped records."""
    why: str
    """A note about a hit, a near hit's figures, or what serves groups without a record. Empty for a miss and
    a plain hit."""
    why_not: str
    """Why torch computes the product, in one clause; empty if it does not, or if it is the recorded winner.
    """
    change: str
    """Actions that would change the outcome."""
    ignored: tuple[str, ...] = ()
    """Settings and files that have no effect, and why."""

    @property
    def percent_of_roofline(self) -> float | None:
        """The floor over the record's measured time; None for a near hit, which was not measured."""
        if self.record is None or self.offer is not None:
            return None
        return 100 * self.device.roofline_us(self.record.problem) / self.record.median_us

    @property
    def percent_of_peak(self) -> float | None:
        """The record's measured rate over the device's arithmetic peak; None as above."""
        if (percent := self.percent_of_roofline) is None:
            return None
        return percent * self.roofline_tflops / self.device.peak_tflops_of(self.problem)

    def asdict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        facts: dict[str, Any] = {"problem": document_of(self.problem), "device": self.device.spec}
        facts |= _facts(
            self, "flops", "bytes", "flops_per_byte", "ridge_flops_per_byte", "bound", "roofline_us",
            "roofline_tflops", "outcome", "why", "why_not", "change",
        )  # fmt: skip
        facts["ignored"] = list(self.ignored)
        facts |= dict.fromkeys(("tile", "record", "expected_ratio", "predicted", "runner_up"))
        if self.tile is not None:
            facts["tile"] = asdict(self.tile) | {"candidate": dict(self.tile.candidate.params)}
        if (record := self.record) is not None:
            facts["record"] = _facts(record, "label", "layer", "median_us", "ratio", "noise", "confirmed") | {
                "family": record.candidate.family,
                "candidate": dict(record.candidate.params),
                "shape": record.problem.shape,
                "measured_at": record.measured_at.isoformat(timespec="seconds"),
                "percent_of_roofline": self.percent_of_roofline,
                "percent_of_peak": self.percent_of_peak,
            }
        if (offer := self.offer) is not None and not isnan(offer.record.ratio):
            facts["expected_ratio"] = offer.expected or offer.record.ratio
        if offer is not None and offer.expected is not None:
            facts["predicted"] = {
                "label": offer.record.label,
                "family": offer.record.candidate.family,
                "candidate": dict(offer.record.candidate.params),
                "expected_ratio": offer.expected,
                "least_ratio": offer.bound,
                "evidence": offer.basis,
            }
        if (second := self.runner_up) is not None:
            facts["runner_up"] = _facts(second, "label", "ratio", "median_us")
            facts["runner_up"] |= {"family": second.candidate.family, "evidence": _proof(second)}
        return facts

    def __str__(self) -> str:
        lines = [f"{self.problem} on {self.device.name}"]
        lines += [f"  {name:<10}{text}" for name, text in self._lines()]
        return "\n".join(lines)

    def _lines(self) -> Iterator[tuple[str, str]]:
        device = self.device
        yield "work", f"{self.flops / 1e9:.3g} GFLOP, at least {self.bytes / 1e6:.3g} MB of device memory"
        if (lack := device.lacks_memory(self.problem)) is not None:
            yield "", f"too large to be tuned: {lack}"
        peak_tflops = device.peak_tflops_of(self.problem)
        yield (
            "intensity",
            f"{significant(self.flops_per_byte, 3)} FLOP/B, ridge point {self.ridge_flops_per_byte:.0f}: "
            f"{self.bound}-bound ({peak_tflops:g} TFLOP/s, {device.bandwidth_gbps:g} GB/s)",
        )
        rate = significant(self.roofline_tflops, 3)
        yield "roofline", f"{significant(self.roofline_us)} us, {rate} TFLOP/s"
        if (tile := self.tile) is not None:
            yield "tile", f"{tile.candidate.family} {tile.label}: {tile.verdict}"
            yield (
                "",
                f"{tile.flops_per_smem_byte:.0f} FLOP per byte of shared memory filled: "
                f"{tile.tile_tflops:.0f} TFLOP/s from device memory alone, without L2",
            )
            yield (
                "",
                f"{tile.tiles} tiles on {device.sm_count} multiprocessors: {tile.waves} waves, "
                f"{tile.wave_efficiency:.0%} busy"
                + (f"; {tile.smem_bytes} B of shared memory" if tile.smem_bytes is not None else ""),
            )
        record, offer = self.record, self.offer
        if record is None and offer is None:
            yield "dispatch", f"torch: {self.why_not}" if self.why_not else self.why
        else:
            if offer is not None and offer.expected is not None:
                yield "dispatch", f"predicted, {offer.record.label}: {offer}"
            elif offer is not None:
                yield "dispatch", f"near hit, {(record or offer.record).label} {offer}"
            elif record is not None:
                torchs = self.problem.torch_call
                label = torchs if self.problem.groups and is_torch(record.candidate) else record.label
                beside = "the fastest" if record.is_torch else f"{record.ratio:.3f} x {torchs}"
                yield (
                    "dispatch",
                    f"{label}: {record.median_us:.1f} us, {beside}, "
                    f"{self.percent_of_roofline:.1f} % of the roofline, {self.percent_of_peak:.1f} % of peak",
                )
            if self.why_not:
                yield "", f"but torch computes it: {self.why_not}"
            elif self.why:
                yield "", self.why
            if record is not None:
                yield "evidence", _evidence(record)
                if skews := over_skews(record.telemetry):
                    yield "", skews
        if (second := self.runner_up) is not None:
            yield (
                "runner-up",
                f"{second.label}: {second.median_us:.1f} us, {second.ratio:.3f} x {self.problem.torch_call} "
                f"in {_proof(second)}",
            )
        yield from (("ignored", line) for line in self.ignored)
        command, _, purpose = self.change.rpartition(": ")
        if command.startswith("tunegemm "):  # to be copied: alone on its line
            yield "change", f"{purpose}:"
            yield "", command
        else:
            yield "change", self.change


def _facts(item: object, *names: str) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names}


@named_arguments
def explain(
    a: torch.Tensor | Problem | str | Sequence[int],
    b: torch.Tensor | None = None,
    *,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    accumulation: str = "fast",
) -> Explanation:
    """Say what `tunegemm.matmul(a, b)` does and why; print the result. Nothing is multiplied.

    Instead of two tensors, give a `Problem` or extents, ``"512x6144x4096"`` or ``(512, 6144, 4096)``, bf16
    and k-major.

    epilogue: of a fused call, such as ``bias_n+gelu``. out_dtype and accumulation: as in a `Problem`. For CPU
    tensors it describes ``cuda:0``, or an H200 if there is no GPU. It reads the databases again and follows
    the mode and policy that the environment or `tunegemm.policy` set. Raises ProblemError for operands that
    torch always computes.
    """
    import torch

    from tunegemm.dispatch import extension
    from tunegemm.dispatch.forms import MATMUL, Refusal, describe, form_of
    from tunegemm.tuning.tuner import as_problem, open_device

    if b is None and isinstance(a, torch.Tensor):
        raise ProblemError("explain(a) has one operand of the product; give both, explain(a, b)")
    if b is None:
        how = {"epilogue": str(epilogue), "accumulation": accumulation}
        arguments = how | ({"out_dtype": str(out_dtype)} if out_dtype is not None else {})
        problem = as_problem(a, **arguments)  # type: ignore[arg-type]
        return explain_problem(problem, open_device(), policy=extension.policy())
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        raise ProblemError(
            "explain() takes two tensors, or a Problem or extents such as 4096x4096x4096 alone"
        )
    if len(a.shape) > 1 and len(b.shape) > 1 and a.shape[-1] != b.shape[-2]:
        raise ProblemError(
            f"operands of shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit: a has "
            f"{a.shape[-1]} columns and b {b.shape[-2]} rows; transpose or reshape one"
        )
    operands = describe(a, b, form=form_of(MATMUL, str(epilogue), out_dtype, accumulation))
    if isinstance(operands, Refusal):
        reason = (
            operands.reason or f"operands of shapes {tuple(a.shape)} and {tuple(b.shape)} fall back to torch"
        )
        raise ProblemError(f"{reason}; torch.matmul computes their product")
    device = open_device(f"cuda:{a.device.index or 0}" if a.device.type == "cuda" else None)
    return explain_problem(operands.problem, device, policy=extension.policy())


def explain_problem(
    problem: Problem,
    device: Device,
    *,
    candidate: Candidate | str | None = None,
    database: str | None = None,
    policy: Policy | None = None,
) -> Explanation:
    """The roofline of a problem on a device, of a candidate or else of the kernel that dispatch would launch,
    and why.

    candidate: one, or its text for `candidate_of`, which starts from what dispatch would launch. database:
    the only one to read; None reads all layers, as dispatch does. policy: by default the environment's.
    Raises DeviceError if the device's peaks are unknown.
    """
    if not device.peak_tflops:
        raise DeviceError(
            f"{device.name}: its peak and bandwidth are not known to tunegemm; use --device model:h200"
        )
    ignored: list[str] = []  # mistakes in the environment, which dispatch warns of
    policy = policy or read_policy(ignored.append)
    mode = read_mode(ignored.append)
    records, entries, warnings = _read(problem, database)
    selection = select(
        Snapshot(records), problem, device, near=mode != "exact", policy=policy, rivals=lambda _: entries
    )
    options = selection.options
    loadable = (option for option in options if not _refusal_to_load(option, device))
    chosen = next(loadable, options[0] if options else None)
    offer = next((offer for offer in selection.offers if offer.record is chosen), None)
    record = chosen if offer is None else offer.origin
    by_table = chosen is None and selection.outcome == "predicted"
    if record is not None and problem.groups:
        record = with_skews(
            record, entries if record.problem == problem else _read(record.problem, database)[1]
        )
    why_not = "; ".join([selection.why, *warnings]) if chosen is None and not by_table else ""
    if mode == "off":
        why_not = "TUNEGEMM_MODE=off"
    elif chosen is not None:
        why_not = _refusal_to_load(chosen, device)
    shown = chosen.candidate if chosen is not None else None
    if candidate is not None:
        ranked = functools.partial(ranked_by_model, problem, device)
        shown = candidate_of(candidate, shown, ranked) if isinstance(candidate, str) else candidate
    ridge = device.peak_tflops_of(problem) * 1e3 / device.bandwidth_gbps
    roofline_us = device.roofline_us(problem)
    return Explanation(
        problem=problem,
        device=device,
        flops=problem.flops,
        bytes=problem.bytes,
        flops_per_byte=problem.arithmetic_intensity,
        ridge_flops_per_byte=ridge,
        bound="compute" if problem.arithmetic_intensity >= ridge else "memory",
        roofline_us=roofline_us,
        roofline_tflops=problem.flops / roofline_us / 1e6,
        tile=None if shown is None or "tile_m" not in shown.params else _tile(problem, shown, device),
        outcome=selection.outcome,
        record=record,
        offer=offer,
        runner_up=None if offer and offer.expected is None else _runner_up(record, entries, device),
        why=selection.why if by_table or not (chosen is None or offer) else "",
        why_not=why_not,
        change=_change(problem, selection, record, why_not),
        ignored=(*ignored, *(line for line in warnings if line not in why_not)),
    )


def ranked_by_model(problem: Problem, device: Device, family: str) -> Iterable[Candidate]:
    """A family's kernels for a problem in the model's order."""
    return (ranking.candidate for ranking in Space(family, problem, device).ranked())


def candidate_of(
    text: str,
    start: Candidate | None = None,
    ranked: Callable[[str], Iterable[Candidate]] = lambda family: (),
) -> Candidate:
    """A candidate from ``FAMILY,NAME=VALUE,...``.

    The other parameters come from `start` if it belongs to the same family. Otherwise they come from the
    first of the family's `ranked` candidates with these values, or else from the first of the space. Raises
    SpaceError for an unknown family or parameter, and for a value that it cannot have.
    """
    family, *pairs = text.split(",")
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise SpaceError(f"candidate {text!r}: {wrong[0]!r} is not NAME=VALUE")
    values = dict(pair.split("=", 1) for pair in pairs)
    if len(values) < len(pairs):
        raise SpaceError(f"candidate {text!r} gives a parameter twice; give each once")
    chosen = {name: parsed_value(value) for name, value in values.items()}
    plain = chosen_candidate(family, chosen)
    if not families.get(family).compiled:
        return plain
    if start is None or start.family != family:
        start = next((item for item in ranked(family) if chosen.items() <= item.params.items()), None)
    known = {name: start[name] for name in plain.params if name in start.params} if start is not None else {}
    return chosen_candidate(family, known | chosen)


def parsed_value(text: str) -> int | str | bool:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        return text


def _tile(problem: Problem, candidate: Candidate, device: Device) -> TileFacts:
    family = families.generator(candidate.family)
    tile_m, tile_n, tile_k = (candidate[name] for name in ("tile_m", "tile_n", "tile_k"))
    loaded = (tile_m + tile_n) * tile_k * DTYPE_BYTES[problem.in_dtype]
    intensity = 2 * tile_m * tile_n * tile_k / loaded
    work = tile_count(problem, candidate) * int(candidate.params.get("split_k", 1))
    waves = ceil(work / device.sm_count)
    verdict = family.check(problem, candidate, device)
    try:
        smem_bytes = family.smem_bytes(problem, candidate)
    except (ArithmeticError, LookupError):  # such as no warpgroup for 7 rows
        if verdict:
            raise
        smem_bytes = None
    return TileFacts(
        candidate=candidate,
        label=family.label(candidate),
        verdict=str(verdict),
        flops_per_smem_byte=intensity,
        tile_tflops=min(device.peak_tflops_of(problem), intensity * device.bandwidth_gbps / 1e3),
        tiles=work,
        waves=waves,
        wave_efficiency=work / (waves * device.sm_count),
        smem_bytes=smem_bytes,
    )


def _read(problem: Problem, location: str | None) -> tuple[list[StoredRecord], list[StoredRecord], list[str]]:
    """Records and further measurements of the problem, in all layers or in one database; and warnings.

    Raises DatabaseError if the one database cannot be read; an unreadable layer is skipped, as by dispatch.
    """
    if location is None:
        if missing := absent():  # report a missing file that the user named
            raise DatabaseError(missing[0])
        records, warnings = read_records()
        return records, read_rivals(problem), warnings
    from tunegemm.store import Database

    with Database.open(location, read_only=True) as database:
        return database.records(), database.measurements(problem), []


def _runner_up(
    record: StoredRecord | None, entries: Sequence[StoredRecord], device: Device
) -> StoredRecord | None:
    others = [
        entry for entry in entries
        if record is not None and entry.candidate != record.candidate
        and judge_stored(entry, device.fingerprint).usable
    ]  # fmt: skip
    return next(iter(leaders(others)), None)


def _proof(record: StoredRecord) -> str:
    """The evidence behind its figures: ratios of unlike evidence do not compare."""
    return _EVIDENCE[record.evidence] + (f", imported from {record.origin}" if record.origin else "")


def _refusal_to_load(record: StoredRecord, device: Device) -> str:
    if is_torch(record.candidate) or not device.is_real:
        return ""
    from tunegemm.dispatch.launchers import find_object  # imports torch

    try:
        find_object(record, device)
    except ArtifactError as error:
        return str(error)
    return ""


def with_skews(record: StoredRecord, entries: Sequence[StoredRecord]) -> StoredRecord:
    """The record with its measurement's figures for each division of the rows, if they are stored."""
    same = [entry for entry in entries if entry.candidate == record.candidate and "skews" in entry.telemetry]
    return replace(record, telemetry=leaders(same)[0].telemetry) if same else record


def over_skews(telemetry: Mapping[str, Any]) -> str:
    """A grouped record's figures for each division of the rows; empty for other records."""
    result = telemetry.get("skews")
    if not isinstance(result, Mapping) or not all(isinstance(item, float) for item in result.values()):
        return ""
    each = ", ".join(f"{skew} {ratio:.3f}" for skew, ratio in result.items())
    worst = min(result, key=lambda skew: result[skew])
    return f"over divisions of the rows: {each}; worst {worst}"


def _evidence(record: StoredRecord) -> str:
    proof = "from a search; no final race confirmed it"
    if record.confirmed:
        proof = "confirmed: it won a final race"
        if record.method == STEADY_FINAL:
            proof += " in steady state"
        elif record.layer in ("system", "pack") and not is_memory_bound(record.problem):  # files lack it
            proof += ", in steady state if at the power cap"
    beside = "as the baseline" if record.is_torch else record.problem.torch_call
    return (
        f"{record.median_us:.1f} us, {beside} {record.baseline_median_us:.1f} us, "
        f"noise {record.noise:.1%}, {proof}, {record.measured_at:%Y-%m-%d}"
        + (f"  [{record.layer} layer]" if record.layer else "")
    )


def _change(problem: Problem, selection: Selection, record: StoredRecord | None, why_not: str) -> str:
    command = tune_command(problem)
    if why_not.startswith("TUNEGEMM_MODE"):
        return "another TUNEGEMM_MODE"
    if selection.outcome == "near" or record is None:
        return f"{command}: its own record"
    if why_not:
        waits = read_switch("TUNEGEMM_COMPILE", lambda _: None)
        meanwhile = ", as its first call does in the background" if waits else ""
        return f"{command}: compiles the missing kernel{meanwhile}"
    if selection.why.startswith("to be verified"):
        return f"tunegemm verify: {selection.why}"
    if not record.confirmed:
        return f"{command}: a final race"
    return f"{command} --effort full: a wider search; another driver, toolchain or kernel source"
