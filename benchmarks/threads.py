"""Tests whether threads that share streams get their own products, for every family and reduction.

    python -m benchmarks.threads                # 1,000,000 calls or a little more

Eight threads call `tunegemm.matmul`, and products of groups, on one stream or on four, without and with a
ninth thread that captures the product in CUDA graphs and replays them. With four streams the default stream
is kept busy, too. Writes results/GPU/threads.json: a row for each; `host_us` is the host time of one call
from a single thread.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tunegemm
from benchmarks.command import command, parser_of
from benchmarks.dispatch import host_times, place
from benchmarks.results import Results
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
from tunegemm.errors import TunegemmError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import FAMILY, is_torch
from tunegemm.groups import grouped
from tunegemm.model import grouped as table
from tunegemm.report.explain import candidate_of
from tunegemm.store.record import Record

THREADS = 8
#: Calls of a thread between two comparisons.
AT_ONCE = 50
#: Rounds that measure the host time of every kernel, in shuffled order.
ROUNDS = 31
METHOD = (
    f"{THREADS} threads, operands of their own, {AT_ONCE} calls between comparisons; a result is wrong where "
    "a bit differs from the product of its operands computed alone"
)

SMALL, FEW, WIDE = Problem(64, 512, 2048), Problem(8, 512, 4096), Problem(640, 1024, 1024)
_CUTE = "cute_sm90,tile_n=64,stages=6,epi_n=32"
_STREAMED = "cute_sm90,tile_m=128,tile_n=64,stages=5,epi_n=32,tile_scheduler=stream_k"
_SKINNY = "skinny,tile_k=512,warps_k=8,stages=4,vector_bytes=16,ctas=all"
_GLUON = "gluon_wgmma,schedule=multistage,tile_n=128,stages=6"
_TRITON = "triton_tma,tile_n=64,stages=4,epi_n=64"
_PORTABLE = "triton,tile_m=64,tile_n=64,tile_k=64,stages=3,ctas=all"
_SM80 = "cute_sm80,tile_m=64,tile_n=64,stages=4,warps_m=2,warps_n=2,smem_swizzle=2,ctas=all"
#: Kernels as `tunegemm explain` takes them, and how the sums of their k splits meet.
KERNELS = (
    ("none", SMALL, _CUTE),
    ("pairs", SMALL, f"{_CUTE},split_k=4"),
    ("second_kernel", SMALL, f"{_CUTE},split_k=4,reduction=second_kernel"),
    ("stream_k pairs", WIDE, _STREAMED),
    ("stream_k second_kernel", WIDE, f"{_STREAMED},reduction=second_kernel"),
    ("none", FEW, _SKINNY),
    ("last_cta", FEW, f"{_SKINNY},split_k=2"),
    ("none", SMALL, _GLUON),
    *((way, SMALL, kernel + more) for kernel in (_TRITON, _PORTABLE, _SM80)
      for way, more in (("none", ""), ("last_cta", ",split_k=4"))),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel, and how the sums of its k splits meet."""

    family: str
    reduction: str
    problem: Problem
    candidate: Candidate


def cases(device: Device) -> list[Case]:
    """One kernel of each family and way to add k splits; for the library, the algorithms that it returns
    here.
    """
    kernels = [(reduction, problem, candidate_of(text)) for reduction, problem, text in KERNELS]
    made = [Case(each.family, reduction, problem, each) for reduction, problem, each in kernels]
    return made + _of_library(Problem(128, 576, 7168), device)


def _of_library(problem: Problem, device: Device) -> list[Case]:
    """cuBLASLt's first algorithm without k splits, and the first of each way that it has to add them."""
    result: dict[str, Candidate] = {}
    for candidate in FAMILY.discover(problem, device):
        if is_torch(candidate):
            continue
        splits = candidate["split_k"] != 1
        result.setdefault(str(candidate["reduction_scheme"]).lower() if splits else "none", candidate)
    return [Case("cublaslt", reduction, problem, item) for reduction, item in sorted(result.items())]


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a result was wrong."""
    parser = parser_of("benchmarks.threads", __doc__)
    parser.add_argument("--calls", type=int, default=1_000_000, help="of all rows together, at least")
    options = parser.parse_args(arguments)
    device = find_device(options.device)
    results = Results.of(options.out, device, "threads.json", METHOD)
    with tempfile.TemporaryDirectory(prefix="tunegemm-") as folder:
        place(Path(folder))
        return int(run(device, options.calls, results) > 0)


def run(device: Device, calls: int, results: Results) -> int:
    """Writes the rows; how many results were wrong."""
    compiled = cases(device)
    for case in compiled:
        prepare(case, device)
    settings = [(streams, captures) for streams in (1, 4) for captures in (False, True)]
    results.rows = []
    trials: list[Trial] = [Product(case, device) for case in compiled]
    trials += [Groups(product, extents, device) for product, *extents in GROUPS]
    each = -(-calls // (len(trials) * len(settings) * THREADS * AT_ONCE)) * AT_ONCE
    took = host_times(
        {str(index): trial.call for index, trial in enumerate(trials)}, ROUNDS, torch.cuda.synchronize
    )
    for index, trial in enumerate(trials):
        host_us = round(statistics.median(took[str(index)]), 2)
        trial.serve()
        for streams, captures in settings:
            wrong = trial.wrong(each, streams, captures)
            row = {
                **trial.extents, "dtype": "bf16", "label": trial.label, "family": trial.family,
                "reduction": trial.reduction, "threads": THREADS, "streams": streams, "captures": captures,
                "calls": each * THREADS, "wrong": wrong, "host_us": host_us,
            }  # fmt: skip
            results.rows.append(row)
            name = f"{trial.family} {trial.reduction}, {streams} streams, captures {captures}"
            print(f"{name}: {wrong} wrong of {each * THREADS}", flush=True)
    results.summary = {name: sum(row[name] for row in results.rows) for name in ("calls", "wrong")}
    results.put()
    print(results.summary)
    return int(results.summary["wrong"])


def prepare(case: Case, device: Device) -> None:
    """Compiles a case's kernel into the user's store."""
    operation = tunegemm.Operation(case.problem, case.candidate, device)
    if not (verdict := operation.can_implement()):
        raise TunegemmError(f"{case.family} {case.reduction}: {verdict}; give another kernel in `cases`")
    operation.compile()


class Trial:
    """A kernel, operands for each thread, and their products computed alone."""

    def __init__(
        self, family: str, reduction: str, label: str, extents: Mapping[str, int], device: Device
    ) -> None:
        self.family, self.reduction, self.label, self.extents = family, reduction, label, extents
        self._place = device.spec
        self._inputs: list[Any] = []
        self._expected: list[Any] = []

    def _take(self, inputs: Sequence[Any], exact: Callable[[Any], Any]) -> None:
        """Stores each thread's operands, whose products must equal those of `exact`, computed in fp32."""
        self._inputs = list(inputs)
        self._expected = [self._product(x).clone() for x in self._inputs]
        for x, result in zip(self._inputs, self._expected, strict=True):
            wanted = exact(x)
            if float((wanted - result.float()).norm() / wanted.norm()) > 5e-3:
                raise TunegemmError(f"{self.label} is wrong alone, on {self.extents}")

    def serve(self) -> None:
        """From now on this kernel is launched."""

    def call(self) -> Any:
        """One product, as a user calls for it."""
        return self._product(self._inputs[0])

    def _product(self, x: Any) -> Any:
        raise NotImplementedError

    def _check_served(self) -> None:
        """Raises unless all products were the kernel's."""

    def wrong(self, calls: int, streams: int, captures: bool) -> int:
        """Wrong results among so many calls of each thread, and among those of concurrent graphs."""
        made = [torch.cuda.Stream(self._place) for _ in range(streams)] if streams > 1 else [None]
        counted = torch.zeros(THREADS + 1, dtype=torch.int64, device=self._place)
        torch.cuda.synchronize()
        errors: list[BaseException] = []
        begin, end = threading.Barrier(THREADS + captures), threading.Event()

        def work(index: int) -> None:
            x, expected = self._inputs[index], self._expected[index]
            with torch.cuda.stream(made[index % len(made)]):
                begin.wait()
                for _ in range(calls // AT_ONCE):
                    results = torch.stack([self._product(x) for _ in range(AT_ONCE)])
                    counted[index] += (results != expected).flatten(1).any(1).sum()

        def capture() -> None:
            x, expected = self._inputs[-1], self._expected[-1]
            stream = torch.cuda.Stream(self._place)
            begin.wait()
            with torch.cuda.stream(stream):
                while not end.is_set():
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        results = [self._product(x) for _ in range(4)]
                    for _ in range(8):
                        graph.replay()
                        counted[-1] += (torch.stack(results) != expected).flatten(1).any(1).sum()
                    stream.synchronize()

        def work_by_default() -> None:
            """Work on the default stream, never so much that its queue is full."""
            square = torch.ones(2048, 2048, device=self._place)
            done = torch.cuda.Event()
            while not end.is_set():
                for _ in range(8):
                    square.mul_(1.0)
                done.record()
                done.synchronize()

        def guarded(task: Any, *arguments: Any) -> None:
            try:
                task(*arguments)
            except BaseException as error:
                errors.append(error)
                begin.abort()

        workers = [threading.Thread(target=guarded, args=(work, index)) for index in range(THREADS)]
        beside = threading.Thread(target=guarded, args=(capture,))
        busy = threading.Thread(target=guarded, args=(work_by_default,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for worker in [*workers, *([beside] if captures else []), *([busy] if streams > 1 else [])]:
                worker.start()
            for worker in workers:
                worker.join()
            end.set()
            for other in (beside, busy):
                if other.ident is not None:
                    other.join()
        torch.cuda.synchronize()
        if errors:
            raise errors[0]
        self._check_served()
        return int(counted.sum())


class Product(Trial):
    """A kernel of a product, served alone: it launches every product of its problem."""

    def __init__(self, case: Case, device: Device) -> None:
        m, n, k = case.problem.m, case.problem.n, case.problem.k
        label = families.get(case.family).label(case.candidate)
        super().__init__(case.family, case.reduction, label, {"m": m, "n": n, "k": k}, device)
        source = families.kernel_source_hash(case.family)
        record = Record(
            case.problem, case.candidate, device.fingerprint, ratio=1.2, confirmed=True, kernel_source=source
        )
        self._dispatcher = Dispatcher(Planner(read=lambda: Snapshot([record])))
        self.serve()
        made: dict[str, Any] = {"dtype": torch.bfloat16, "device": self._place}
        torch.manual_seed(0)
        self._weight = torch.randn(n, k, **made)
        inputs = [torch.randn(m, k, **made) for _ in range(THREADS + 1)]
        self._take(inputs, lambda x: x.float() @ self._weight.t().float())
        self._check_served()

    def serve(self) -> None:
        api.serve_by(self._dispatcher)

    def call(self) -> Any:
        return self._dispatcher.matmul(self._inputs[0], self._weight.t())

    def _product(self, x: Any) -> Any:
        return tunegemm.matmul(x, self._weight.t())

    def _check_served(self) -> None:
        plans = self._dispatcher.planner.state.plans.values()
        if not plans or any(not plan or plan.record is None for plan in plans):
            raise TunegemmError(f"{self.label} does not serve {self.extents}")


#: Products of groups: what they are, rows in all, groups, N and K.
GROUPS = (
    ("rows", 512, 16, 1024, 2048), ("one row", 1, 16, 1024, 2048), ("along k", 4096, 8, 1024, 1024),
    ("gate", 512, 16, 1024, 2048),
)  # fmt: skip


class Groups(Trial):
    """A product of groups by the kernel that the shipped table names for it."""

    def __init__(self, product: str, extents: Sequence[int], device: Device) -> None:
        rows, groups, n, k = extents
        super().__init__("grouped", product, "", {"m": rows, "n": n, "k": k, "batch": groups}, device)
        self._gate = "swiglu" if product == "gate" else ""
        self._groups = grouped.Groups()
        torch.manual_seed(0)
        made: dict[str, Any] = {"dtype": torch.bfloat16, "device": self._place}
        along = product == "along k"
        self._weight = torch.randn(rows, n, **made) if along else torch.randn(groups, n, k, **made).mT
        starts = [rows * i // groups for i in range(groups + 1)]
        self._ends = torch.tensor(starts[1:], dtype=torch.int32, device=self._place)
        # Along k operands are (k, rows) with k contiguous, as an activation's transpose has it.
        inputs = [torch.randn(rows, k, **made) for _ in range(THREADS + 1)]
        spans = list(itertools.pairwise(starts))

        def exact(x: Any) -> Any:
            weight = self._weight.float()
            if along:
                return torch.stack([x.float()[i:j].mT @ weight[i:j] for i, j in spans])
            whole = torch.cat([x.float()[i:j] @ weight[group] for group, (i, j) in enumerate(spans)])
            gate, up = whole.chunk(2, 1)
            return torch.nn.functional.silu(gate) * up if self._gate else whole

        self.serve()
        self._wait(inputs[0].mT if along else inputs[0])
        self._take([x.mT for x in inputs] if along else inputs, lambda x: exact(x.mT if along else x))
        find: Any = table.choose_along_k if along else lambda *x, **y: table.choose(*x, gate=self._gate, **y)
        self.label = str(find(groups, *((k, n) if along else (n, k)), rows, gpu=device.name).config)

    def _wait(self, x: Any) -> None:
        """Until the kernel is compiled, where it does not ship."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(60):
                if self._groups(x, self._weight, self._ends, None, self._gate) is not None:
                    return
                time.sleep(2)
        raise TunegemmError(f"no kernel serves groups of {self.extents}; give other extents in GROUPS")

    def _product(self, x: Any) -> Any:
        result = self._groups(x, self._weight, self._ends, None, self._gate)
        if result is None:
            raise TunegemmError(f"torch computes groups of {self.extents}")
        return result


if __name__ == "__main__":
    sys.exit(main())
