"""Parts of a tile on the GPU: split-K and stream-K, sums that meet in pairs and in a second kernel."""

import itertools

import pytest
import torch

from tests.support.kernels import Kernels, selected
from tests.support.numerics import TOLERANCE, Case, check_bits, check_product, poisoned, relative_error
from tests.support.sampled import covering
from tunegemm.describe.device import Device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.generate.cute_sm90 import FAMILY, Division
from tunegemm.generate.launching import Launcher
from tunegemm.generate.workspace import Workspace

pytestmark = pytest.mark.gpu

NAMES = (
    "schedule", "tile_scheduler", "tile_m", "tile_n", "tile_k", "stages", "cluster_m", "cluster_n", "epi_n",
    "swap_ab",
)  # fmt: skip
TILES = [
    ("cooperative", 128, 128, 64, 5, 1, 2, 32, False),
    ("cooperative", 192, 160, 64, 4, 1, 1, 32, False),
    ("cooperative", 256, 112, 64, 4, 2, 1, 16, False),
    ("pingpong", 128, 128, 64, 5, 1, 1, 32, False),
    ("pingpong", 64, 96, 64, 8, 2, 2, 32, False),
    ("cooperative", 64, 16, 128, 8, 1, 1, 16, True),
]
STATIC, STREAM = ([(tile[0], scheduler, *tile[1:]) for tile in TILES] for scheduler in ("static", "stream_k"))
REDUCTIONS = ("pairs", "second_kernel")
# m, n, k, batch, padding of each row, parts of split-K
SHAPES = [
    (512, 512, 4096, 1, 0, 8),
    (1000, 1032, 1096, 1, 0, 3),
    (72, 264, 2056, 1, 8, 5),
    (304, 520, 1160, 3, 0, 2),
    (2048, 2112, 1000, 1, 16, 2),
    (8, 8, 136, 1, 0, 16),
]
KINDS = [("tn", "bf16", "bf16"), ("nn", "fp16", "fp32"), ("tt", "bf16", "bf16")]
EPILOGUES = [
    ("bias_n+gelu_tanh", "bf16", "bf16"), ("bias_m+relu", "bf16", "fp32"), ("swiglu", "bf16", "bf16"),
    ("residual", "bf16", "bf16"), ("amax", "bf16", "bf16"), ("scale_tensor", "fp8_e4m3", "bf16"),
    ("", "int8", "int32"), ("", "tf32", "fp32"), ("", "fp8_e4m3", "fp8_e4m3"),
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels(kernels: Kernels, request: pytest.FixtureRequest) -> Kernels:
    wanted, cases = [], selected(request, "kind", "kernel")
    cases += [(KINDS[0], kernel) for (kernel,) in selected(request, "kernel")]
    for (layout, in_dtype, out_dtype), kernel in cases:
        problem = Problem.parse("512x512x512", dtype=in_dtype, out_dtype=out_dtype, layout=layout)
        wanted.append((problem, kernel))
    wanted += [fused(*case) for case in selected(request, "epilogue", "scheduler", "shape", "swap")]
    kernels.begin_all((problem, candidate(kernel)) for problem, kernel in wanted)
    return kernels


def candidate(kernel: tuple[str | int, ...], **launch: str | int) -> Candidate:
    standard = {"raster_order": "along_m", "swizzle_size": 2, "ctas": "all", "split_k": 1, "l2_hint": "none"}
    return Candidate.make("cute_sm90", dict(zip(NAMES, kernel, strict=True)), standard | launch)


def load(
    kernels: Kernels, problem: Problem, chosen: Candidate, device: Device | None = None
) -> tuple[Launcher, Workspace | None]:
    """A launcher, and its workspace, as large as the family says: to be lent, or the launcher has its own."""
    device = device or kernels.device
    verdict = FAMILY.check(problem, chosen, device)
    # Rules about speed, or about what repeats another candidate, do not matter: it must be right.
    assert verdict.runs, (problem, verdict)
    path = kernels.compiled(problem, chosen)
    workspace = FAMILY.workspace(problem, chosen, device)
    return FAMILY.load(problem, chosen, device, path, workspace), workspace


class Lent:
    """A poisoned workspace between guards, which a launch must leave as they are."""

    GUARD = 4096

    def __init__(self, workspace: Workspace | None) -> None:
        self.workspace = workspace
        if workspace is not None:
            self.memory = torch.full(
                (workspace.num_bytes + 2 * self.GUARD,), 0xFF, dtype=torch.uint8, device="cuda"
            )
            self.counters.zero_()
            workspace.lend(self.memory.data_ptr() + self.GUARD)

    @property
    def counters(self) -> torch.Tensor:
        assert self.workspace is not None
        first = self.GUARD + self.workspace.partial_bytes
        return self.memory[first : first + self.workspace.counter_bytes]

    def check(self) -> None:
        if self.workspace is not None:
            assert (self.memory[: self.GUARD] == 0xFF).all() and (self.memory[-self.GUARD :] == 0xFF).all()
            assert not self.counters.any(), "counters are not zeros again"


def launches(kernel: tuple[str | int, ...], parts: int) -> list[Candidate]:
    if kernel[1] == "stream_k":
        return [candidate(kernel, reduction=way) for way in REDUCTIONS]
    return [
        candidate(kernel, split_k=parts, reduction=way, ctas=ctas)
        for way, ctas in zip(REDUCTIONS, ("balanced", "all"), strict=True)
    ]


def label(kernel: tuple[str | int, ...]) -> str:
    return FAMILY.label(candidate(kernel).kernel)


#: Of kinds, schedulers and tiles each two together; other tests launch every kernel of the first kind.
OF_KINDS = covering(
    itertools.product(KINDS, range(2), range(len(TILES))),
    given=[*itertools.product(KINDS[:1], range(2), range(len(TILES)))],
)


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [(kind, (STATIC, STREAM)[scheduler][tile]) for kind, scheduler, tile in OF_KINDS],
    ids=lambda value: "-".join(value) if len(value) == 3 else label(value),
)
def test_right_on_every_shape(
    kernels: Kernels, kind: tuple[str, str, str], kernel: tuple[str | int, ...]
) -> None:
    layout, in_dtype, out_dtype = kind
    divided = 0
    for m, n, k, batch, pad, parts in SHAPES:
        problem = Problem.parse(f"{m}x{n}x{k}x{batch}", dtype=in_dtype, out_dtype=out_dtype, layout=layout)
        for chosen in launches(kernel, parts):
            if FAMILY.check(problem, chosen, kernels.device).rule == "shared_memory":
                chosen = Candidate.make(
                    chosen.family, dict(chosen.compile_params) | {"stages": 2}, dict(chosen.launch_params)
                )
            launch, workspace = load(kernels, problem, chosen)
            lent = Lent(workspace)
            divided += workspace is not None
            check_product(launch, problem, FAMILY.label(chosen), pad=pad)
            lent.check()
    assert divided >= 3, "hardly any tile had parts"


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kernel", STATIC + STREAM, ids=label)
def test_fifty_runs_agree_bitwise(kernels: Kernels, kernel: tuple[str | int, ...], reduction: str) -> None:
    """Whoever is late, and however launches crowd: equal inputs give equal bits."""
    problem = Problem.parse("700x1048x3080")
    split = {} if kernel[1] == "stream_k" else {"split_k": 4}
    launch, workspace = load(kernels, problem, candidate(kernel, reduction=reduction, **split))
    assert workspace is not None
    a = torch.randn(700, 3080, device="cuda").bfloat16()
    b = torch.randn(1048, 3080, device="cuda").bfloat16().t()
    check_bits(launch, a, b, FAMILY.label(candidate(kernel)), runs=50)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kernel", [STATIC[0], STREAM[0], STREAM[3]], ids=["static", "stream", "pingpong"])
def test_replays_of_a_graph_are_right(
    kernels: Kernels, kernel: tuple[str | int, ...], reduction: str
) -> None:
    """Products that follow each other in a graph share its memory, and second kernels start early."""
    problem = Problem.parse("520x528x4104")
    split = {} if kernel[1] == "stream_k" else {"split_k": 6}
    launch, _ = load(kernels, problem, candidate(kernel, reduction=reduction, **split))
    matrices = [torch.randn(528, 4104, device="cuda").bfloat16() for _ in range(7)]
    pairs = [(a[:520], b.t()) for a, b in itertools.pairwise(matrices)]
    outs = [torch.empty(520, 528, device="cuda").bfloat16() for _ in pairs]
    for (a, b), out in zip(pairs, outs, strict=True):
        launch(a, b, out)
    torch.cuda.synchronize()
    wanted = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for (a, b), out in zip(pairs, outs, strict=True):
            launch(a, b, out)
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        graph.replay()
        assert all(torch.equal(out, want) for out, want in zip(outs, wanted, strict=True))


FUSED = covering(
    (epilogue, scheduler, shape, swap)
    for epilogue in EPILOGUES
    for scheduler in ("static", "stream_k")
    for shape, swap in (("520x1056x2064", False), ("40x528x4112", True))
    if (epilogue[0], swap) != ("swiglu", True)
)


def fused(
    epilogue: tuple[str, str, str], scheduler: str, shape: str, swap: bool
) -> tuple[Problem, tuple[str | int, ...]]:
    text, dtype, out_dtype = epilogue
    tile_k = {"fp8_e4m3": 128, "int8": 128, "tf32": 32}.get(dtype, 64)
    problem = Problem.parse(shape, dtype=dtype, out_dtype=out_dtype, epilogue=text)
    return problem, ("cooperative", scheduler, 128, 64, tile_k, 4, 1, 1, 32, swap)


@pytest.mark.parametrize(
    ("epilogue", "scheduler", "shape", "swap"),
    FUSED,
    ids=lambda value: "-".join(filter(None, value)) if isinstance(value, tuple) else None,
)
def test_epilogues_and_dtypes(
    kernels: Kernels, epilogue: tuple[str, str, str], scheduler: str, shape: str, swap: bool
) -> None:
    """What an epilogue makes of the sums is made once, of the total."""
    problem, kernel = fused(epilogue, scheduler, shape, swap)
    for reduction in REDUCTIONS:
        chosen = candidate(kernel, reduction=reduction, split_k=4 if scheduler == "static" else 1)
        launch, workspace = load(kernels, problem, chosen)
        assert workspace is not None
        lent = Lent(workspace)
        case = Case.of(problem, seed=5)
        for _ in range(2):
            case.check(launch, FAMILY.label(chosen))
            lent.check()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kernel", [STATIC[0], STREAM[0], STREAM[3]], ids=["static", "stream", "pingpong"])
def test_k_splits_beside_other_work(kernels: Kernels, kernel: tuple[str | int, ...], reduction: str) -> None:
    """Another stream keeps most multiprocessors busy, so that few clusters run at once, whichever: sums that
    meet come late, and nobody may wait for a cluster that has not begun.
    """
    problem = Problem.parse("512x512x16384")
    split = {} if kernel[1] == "stream_k" else {"split_k": 8}
    launch, workspace = load(kernels, problem, candidate(kernel, reduction=reduction, **split))
    assert workspace is not None
    a = torch.randn(512, 16384, device="cuda").bfloat16()
    b = torch.randn(512, 16384, device="cuda").bfloat16().t()
    alone = poisoned(512, 512)
    launch(a, b, alone)
    assert relative_error(alone, a, b) < TOLERANCE["bf16"]
    beside = torch.cuda.Stream()
    big = torch.randn(8192, 8192, device="cuda").bfloat16()
    outs = [poisoned(512, 512) for _ in range(100)]
    torch.cuda.synchronize()
    with torch.cuda.stream(beside):
        for _ in range(30):
            torch.mm(big, big)
    for out in outs:
        launch(a, b, out)
    torch.cuda.synchronize()
    assert all(torch.equal(alone, out) for out in outs)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kernel", [STATIC[0], STATIC[3]], ids=["cooperative", "pingpong"])
def test_k_splits_beyond_the_resident_grid(
    kernels: Kernels, kernel: tuple[str | int, ...], reduction: str
) -> None:
    """Many times as many work units as clusters that run at once: in turns, in whatever order they end."""
    for shape, parts in (("1024x1056x4096", 16), ("1032x1048x8200x3", 12)):
        problem = Problem.parse(shape)
        chosen = candidate(kernel, reduction=reduction, split_k=parts)
        launch, workspace = load(kernels, problem, chosen)
        division = Division.of(problem, chosen, kernels.device)
        assert division.units > 3 * division.clusters, "no more than are resident"
        lent = Lent(workspace)
        check_product(launch, problem, FAMILY.label(chosen), runs=10)
        lent.check()


@pytest.mark.parametrize("clusters", [1, 7, 25, 132])
def test_any_share_of_the_multiprocessors(kernels: Kernels, clusters: int) -> None:
    """Shares that end anywhere: a tile in one part or in many, shares of several tiles."""
    few = kernels.device.with_sm_budget(clusters)
    for shape in ("384x384x16384", "1152x1152x648", "128x128x2056"):
        problem = Problem.parse(shape)
        for kernel, reduction in itertools.product((STREAM[3], STREAM[1]), REDUCTIONS):
            chosen = candidate(kernel, reduction=reduction)
            launch, workspace = load(kernels, problem, chosen, few)
            assert Division.of(problem, chosen, few).clusters <= clusters
            lent = Lent(workspace)
            a = torch.randn(problem.m, problem.k, device="cuda").bfloat16()
            b = torch.randn(problem.n, problem.k, device="cuda").bfloat16().t()
            out = poisoned(problem.m, problem.n)
            launch(a, b, out)
            error = relative_error(out, a, b)
            assert error < TOLERANCE["bf16"], (problem, FAMILY.label(chosen), error)
            lent.check()
