"""The providers of a product that `benchmarks.peers` compares: torch, the vendor's library, peers, tunegemm.

Each is a function of (problem, device, options) that returns its contenders, or raises `Skip` with a reason.
The fastest of several contenders in the interleave is reported.
"""

from __future__ import annotations

import contextlib
import signal
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.interleave import Run, one_line
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch.api import refresh
from tunegemm.errors import TunegemmError, TunegemmWarning
from tunegemm.generate import families
from tunegemm.generate.cublaslt import FAMILY as LIBRARY
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.measure.evidence import leaders
from tunegemm.measure.operands import make_operands
from tunegemm.store import Database, packs
from tunegemm.store.validity import judge_stored
from tunegemm.torch.functions import matmul


class Skip(Exception):
    """Why a provider does not support a problem, in one line."""


class OutOfTime(BaseException):
    """Not an Exception: tuners catch their candidates' exceptions and continue."""


@dataclass(frozen=True)
class Options:
    """What providers need to know of the command line."""

    tune_cap: float
    """Seconds that a peer may tune one shape."""
    database: Path | None
    """The tuning database; None for the default."""


@dataclass(frozen=True)
class Contender:
    """One callable of a provider."""

    run: Run
    label: str = ""
    tune_seconds: float | None = None
    """What the peer spent on finding it, compilation included."""


#: What has something to time for a problem, or raises `Skip`.
Provider = Callable[[Problem, Device, Options], list[Contender]]


def torch_mm(problem: Problem, device: Device, options: Options) -> list[Contender]:
    """torch.mm with a preallocated output; torch.bmm for a batch."""
    product = torch.mm if problem.batch == 1 else torch.bmm
    return [Contender(lambda a, b, out: product(a, b, out=out))]


def cublaslt(problem: Problem, device: Device, options: Options) -> list[Contender]:
    """Every algorithm of cuBLASLt's heuristic, separately."""
    if (missing := LIBRARY.unavailable()) is not None:
        raise Skip(missing)
    if not (results := of_library(problem, device, LIBRARY.discover(problem, device))):
        raise Skip("the heuristic returns no algorithm")
    return results


def of_library(problem: Problem, device: Device, candidates: Iterable[Candidate]) -> list[Contender]:
    """Those of the library's algorithms that it does not refuse, without torch's own choice."""
    results = []
    for candidate in dict.fromkeys(candidates):
        if candidate != TORCH_MM:
            with contextlib.suppress(ValueError):  # the library names algorithms that it then refuses
                launch = LIBRARY.load(problem, candidate, device, None)
                results.append(Contender(launch, LIBRARY.label(candidate)))
    return results


def quack(problem: Problem, device: Device, options: Options) -> list[Contender]:
    """quack's Hopper generator over its own candidate list, split-K included."""
    try:
        from quack.gemm_interface import gemm
    except ImportError as error:
        raise Skip(f"quack-kernels is not installed: {error}") from None

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        gemm(a, b, out=out, tuned=True, split_k=None)

    return [Contender(run, tune_seconds=tuned(run, problem, device, options))]


def max_autotune(problem: Problem, device: Device, options: Options, **settings: str) -> list[Contender]:
    """torch.compile's max-autotune, by default as a user has it: cuBLAS is among its choices."""
    try:
        import triton  # noqa: F401
        from torch._inductor import config
    except ImportError as error:
        raise Skip(f"triton is not installed: {error}") from None
    torch._dynamo.reset()
    product = torch.compile(
        lambda a, b: torch.matmul(a, b), mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True
    )

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return product(a, b)

    with config.patch(**settings):
        return [Contender(run, tune_seconds=tuned(run, problem, device, options))]


#: With Inductor's Triton templates only: cuBLAS is a separate provider.
inductor = partial(max_autotune, max_autotune_gemm_backends="TRITON")


def family_best(name: str) -> Provider:
    """The provider of a single kernel family of ours: its candidate with the best stored evidence."""

    def provider(problem: Problem, device: Device, options: Options) -> list[Contender]:
        family = families.generator(name)
        try:
            with Database.open(options.database, read_only=True) as database:
                stored = [each for each in database.measurements(problem) if each.candidate.family == name]
            entries = [each for each in stored if judge_stored(each, device.fingerprint).usable]
            if not entries:
                raise Skip(f"no {name} candidate is in the database for this device; run with --tune")
            candidate = leaders(entries)[0].candidate
            artifact = packs.find(family.kernel_key(problem, candidate, device))
            if artifact is None:
                raise Skip(f"{family.label(candidate)} is not compiled; run with --tune")
            launch = family.load(problem, candidate, device, artifact.path)
            return [Contender(launch, family.label(candidate))]
        except (TunegemmError, ValueError, RuntimeError) as error:
            raise Skip(str(error)) from None

    return provider


def is_settled(database: Database, problem: Problem, device: Device) -> bool:
    """Whether a problem has a confirmed record, by this software and these kernels, that is served here."""
    record = database.best(problem, device.fingerprint)
    return record is not None and record.confirmed and judge_stored(record, device.fingerprint).usable


def tunegemm(problem: Problem, device: Device, options: Options) -> list[Contender]:
    """The user's view: tunegemm.matmul, with the dispatched kernel as the label."""
    place = torch.device("cuda", device.index)
    operands = make_operands(problem, place, 0)
    refresh()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        matmul(operands.a, operands.b, out=operands.out)
    label = next((f"torch: {w.message}" for w in caught if issubclass(w.category, TunegemmWarning)), "")
    if not label:
        with Database.open(options.database, read_only=True) as database:
            record = database.best(problem, device.fingerprint)
        label = record.label if record else ""

    def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        matmul(a, b, out=out)

    return [Contender(run, label)]


#: In the order of the table; the first is the baseline.
PROVIDERS: Mapping[str, Provider] = {
    "torch": torch_mm, "cublaslt": cublaslt, "quack": quack, "inductor": inductor,
    **{name: family_best(name) for name in ("gluon_wgmma", "triton_tma", "cute_sm80", "skinny")},
    "tunegemm_cute": family_best("cute_sm90"), "tunegemm": tunegemm,
}  # fmt: skip


def tuned(run: Run, problem: Problem, device: Device, options: Options) -> float:
    """Seconds of the first call, in which a peer tunes. Raises Skip if it fails or takes too long."""
    operands = make_operands(problem, torch.device("cuda", device.index), 0)
    start = time.perf_counter()
    try:
        with deadline(options.tune_cap):
            run(*operands.arguments)
            torch.cuda.synchronize()
    except OutOfTime:
        raise Skip(f"still tuning after {options.tune_cap:g} s") from None
    except Exception as error:  # foreign code may raise anything: that is the reason
        raise Skip(one_line(error)) from None
    return time.perf_counter() - start


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the main thread if the body takes longer."""

    def expire(number: int, frame: types.FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
