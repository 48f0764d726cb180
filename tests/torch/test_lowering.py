"""What compiled code guarantees about the operands of a product."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from tunegemm.torch.lowering import site_of


def test_a_site_has_each_extent_and_stride_and_leaves_rows_open() -> None:
    a, b = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(6, 8).t()
    assert site_of((a, b), "name", 2) == (
        "cpu torch.bfloat16 (4, 8) (8, 1); cpu torch.float32 (8, 6) (1, 8); name; 2"
    )
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:

        def fake(shape: tuple[int, ...], *dynamic: int) -> torch.Tensor:
            sizes = [DimDynamic.DYNAMIC if d in dynamic else DimDynamic.STATIC for d in range(len(shape))]
            context = StatelessSymbolicContext(dynamic_sizes=sizes)
            with torch._C._DisableTorchDispatch():
                real = torch.empty(shape)
            return mode.from_tensor(real, symbolic_context=context)

        rows, weight = fake((4, 8), 0), fake((8, 6))
        both = "any rows; cpu torch.float32 (0, 8) (8, 1); cpu torch.float32 (8, 6) (6, 1)"
        assert site_of((rows, weight)) == both
        residual = torch.empty(rows.shape[0], 6)
        assert site_of((rows, weight, residual)) == f"{both}; cpu torch.float32 (0, 6) (6, 1)"
        assert site_of((rows, weight, torch.empty(()))) == f"{both}; cpu torch.float32 () ()"
        for other in (
            (weight, rows),  # the number of rows of b may change, but not that of a
            (rows, fake((8, 6), 1)),
            (rows, weight, fake((5, 6), 0)),
            (fake((4, 8), 0, 1), weight),
        ):
            assert site_of(other) == "", other
