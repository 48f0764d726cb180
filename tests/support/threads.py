"""Threads that share streams, each with its own operands: for every family and reduction.

Eight threads call `tunegemm.matmul` with a shared weight on one stream or on four, without and with a ninth
thread that captures the product in CUDA graphs and replays them. With four streams the default stream is kept
busy, too. Every result is compared, bit by bit, with that of the same operands computed alone.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch

import tunegemm
from tests.support.numerics import difference
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate, Value
from tunegemm.dispatch import api
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.planning import Planner
from tunegemm.generate import families
from tunegemm.generate.cublaslt import FAMILY, is_torch
from tunegemm.store.record import Record

THREADS = 8
#: Calls of a thread between two comparisons.
AT_ONCE = 50

_CUTE: dict[str, Value] = {
    "schedule": "cooperative", "tile_m": 64, "tile_n": 64, "tile_k": 64, "stages": 6, "cluster_m": 1,
    "cluster_n": 1, "epi_n": 32, "swap_ab": False, "tile_scheduler": "static",
}  # fmt: skip
_CUTE_LAUNCH: dict[str, Value] = {
    "raster_order": "along_m", "swizzle_size": 1, "ctas": "all", "split_k": 1, "reduction": "pairs",
    "l2_hint": "none", "cluster_order": "index",
}  # fmt: skip
_STREAMED: dict[str, Value] = {"tile_scheduler": "stream_k", "tile_m": 128, "stages": 5}
_SKINNY: dict[str, Value] = {
    "tile_m": 8, "tile_n": 16, "tile_k": 512, "warps_n": 1, "warps_k": 8, "stages": 4, "vector_bytes": 16,
    "ctas_per_sm": 1,
}  # fmt: skip
_GLUON: dict[str, Value] = {
    "schedule": "multistage", "tile_m": 64, "tile_n": 128, "tile_k": 64, "stages": 6, "warps": 4,
    "instr_n": 256, "lhs_in_registers": False, "occupancy": 1, "swap_ab": False,
}  # fmt: skip
_TRITON: dict[str, Value] = {
    "schedule": "pipelined", "tile_m": 64, "tile_n": 64, "tile_k": 64, "stages": 4, "warps": 4, "epi_n": 64,
    "swap_ab": False,
}  # fmt: skip
_PORTABLE: dict[str, Value] = {
    "tile_m": 64, "tile_n": 64, "tile_k": 64, "stages": 3, "warps": 4, "vector_bytes": 16, "store_bytes": 16,
}  # fmt: skip
_SM80: dict[str, Value] = {
    "tile_m": 64, "tile_n": 64, "tile_k": 32, "stages": 4, "warps_m": 2, "warps_n": 2, "atoms_n": 2,
    "smem_swizzle": 2, "vector_bytes": 16, "ctas_per_sm": 1, "acc_dtype": "fp32",
}  # fmt: skip
_ORDER: dict[str, Value] = {"raster_order": "along_m", "swizzle_size": 1, "ctas": "all"}


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
    small, few, wide = Problem(64, 512, 2048), Problem(8, 512, 4096), Problem(640, 1024, 1024)
    listed: list[tuple[str, str, Problem, dict[str, Value], dict[str, Value]]] = [
        ("cute_sm90", "none", small, _CUTE, _CUTE_LAUNCH),
        ("cute_sm90", "pairs", small, _CUTE, _CUTE_LAUNCH | {"split_k": 4}),
        ("cute_sm90", "second_kernel", small, _CUTE,
         _CUTE_LAUNCH | {"split_k": 4, "reduction": "second_kernel"}),
        ("cute_sm90", "stream_k pairs", wide, _CUTE | _STREAMED, _CUTE_LAUNCH),
        ("cute_sm90", "stream_k second_kernel", wide, _CUTE | _STREAMED,
         _CUTE_LAUNCH | {"reduction": "second_kernel"}),
        ("skinny", "none", few, _SKINNY, {"ctas": "all", "split_k": 1}),
        ("skinny", "last_cta", few, _SKINNY, {"ctas": "all", "split_k": 2}),
        ("gluon_wgmma", "none", small, _GLUON, _ORDER),
        ("triton_tma", "none", small, _TRITON, _ORDER | {"split_k": 1}),
        ("triton_tma", "last_cta", small, _TRITON, _ORDER | {"split_k": 4}),
        ("triton", "none", small, _PORTABLE, _ORDER | {"split_k": 1}),
        ("triton", "last_cta", small, _PORTABLE, _ORDER | {"split_k": 4}),
        ("cute_sm80", "none", small, _SM80, _ORDER | {"split_k": 1}),
        ("cute_sm80", "last_cta", small, _SM80, _ORDER | {"split_k": 4}),
    ]  # fmt: skip
    made = [
        Case(family, reduction, problem, Candidate.make(family, kernel, launch))
        for family, reduction, problem, kernel, launch in listed
    ]
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


def prepare(case: Case, device: Device) -> None:
    """Compiles a case's kernel into the user's store."""
    operation = tunegemm.Operation(case.problem, case.candidate, device)
    assert operation.can_implement(), f"{case.family} {case.reduction}: {operation.can_implement()}"
    operation.compile()


class Product:
    """A kernel of a product, served alone: it launches every product of its problem. For each thread operands
    of its own, and their product computed alone.
    """

    def __init__(self, case: Case, device: Device) -> None:
        m, n, k = case.problem.m, case.problem.n, case.problem.k
        self._label, self._place = families.get(case.family).label(case.candidate), device.spec
        source = families.kernel_source_hash(case.family)
        record = Record(
            case.problem, case.candidate, device.fingerprint, ratio=1.2, confirmed=True, kernel_source=source
        )
        self._dispatcher = Dispatcher(Planner(read=lambda: Snapshot([record])))
        api.serve_by(self._dispatcher)
        made: dict[str, Any] = {"dtype": torch.bfloat16, "device": self._place}
        torch.manual_seed(0)
        self._weight = torch.randn(n, k, **made)
        self._inputs = [torch.randn(m, k, **made) for _ in range(THREADS + 1)]
        self._expected = [self._product(x).clone() for x in self._inputs]
        for x, result in zip(self._inputs, self._expected, strict=True):
            assert difference(result, x.float() @ self._weight.t().float()) < 5e-3, f"{self._label} is wrong"
        self._check_served()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return tunegemm.matmul(x, self._weight.t())

    def _check_served(self) -> None:
        plans = self._dispatcher.planner.state.plans.values()
        served = bool(plans) and all(plan and plan.record is not None for plan in plans)
        assert served, f"{self._label} does not serve all"

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
