"""What type checkers see of the package: its names, with their types, and no others.

Nothing runs this. `make check` reads it by mypy, and test_typing.py by pyright in its strict mode, where a
type that is not known is an error. For both a comment that ignores no error is one.
"""

import torch

import tunegemm
from tunegemm import Candidate, Database, Device, Epilogue, Operation, Problem, TunegemmError, linear
from tunegemm import mathmul as mathmul  # type: ignore[attr-defined]

a = torch.ones(8, 8)
c: torch.Tensor = tunegemm.matmul(a, a, bias=a[0], activation="relu", out_dtype=torch.float32)
c = linear(a, a, a[0], "gelu")
c = tunegemm.gated_linear(a, tunegemm.interleave(a, a))
c = tunegemm.addmm(a, a, a, beta=2, alpha=0.5)
c = tunegemm.baddbmm(a[None], tunegemm.bmm(a[None], a[None]), a[None])
c = tunegemm.scaled_mm(a, a, a, a, out_dtype=torch.bfloat16)
c = tunegemm.grouped_mm(a, a[None], offs=torch.ones(1, dtype=torch.int32), bias=a[0])
c = tunegemm.experts(a, a[None], a[None, :, :4], a[:, :1].long(), a[:, :1], activation="gelu")
with tunegemm.policy("deterministic", max_sms=100):
    c = tunegemm.matmul(a, a, epilogue="alpha", operands=(2.0,))
with tunegemm.enable(), tunegemm.record("x.json") as recording:
    print(recording)
tunegemm.disable()
layers: int = tunegemm.patch(torch.nn.Linear(8, 8)) + tunegemm.unpatch(torch.nn.Linear(8, 8))
print(tunegemm.explain(a, a).problem, Epilogue.parse("relu"))
with Database.open("t.sqlite", create=True) as database:
    result = tunegemm.tune("8x8x8", device="model:h200", database=database, effort="full", trials=3)
    for record in database.records():
        print(record.problem, record.ratio, record.candidate)
if result.best is not None:
    candidate: Candidate = result.best.candidate
    print(result.best.ratio, candidate.family)
device: Device = result.device
try:
    operation = Operation(Problem.from_tensors(a, a), Candidate.make("cute_sm80", {"tile_m": 1}))
    print(operation)
except TunegemmError as error:
    print(error)

x: str = tunegemm.matmul(a, a)  # type: ignore[assignment]
tunegemm.mathmul(a, a)  # type: ignore[attr-defined]
tunegemm.matmul(a, a, biass=None)  # type: ignore[call-arg]
tunegemm.policy("fatsest")  # type: ignore[arg-type]
