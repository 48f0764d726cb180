"""How torch computes fp32 products on a GPU, according to the installed torch.

Not all of its releases (2.10 to 2.14) have ``torch.backends.cuda.matmul.fp32_precision``, and those that do
may raise at ``allow_tf32`` once a program has used both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def fp32_precision() -> str:
    """``tf32`` if products may use it; else ``ieee``, or ``none`` if nobody has set it."""
    import torch

    if (ask := getattr(torch._C, "_get_fp32_precision_getter", None)) is not None:
        return str(ask("cuda", "matmul"))
    return "tf32" if torch._C._get_cublas_allow_tf32() else "ieee"


def set_fp32_precision(precision: str) -> None:
    """Set the precision for this process from now on."""
    import torch

    if (put := getattr(torch._C, "_set_fp32_precision_setter", None)) is not None:
        put("cuda", "matmul", precision)
    else:
        torch._C._set_cublas_allow_tf32(precision == "tf32")


@contextmanager
def computing_fp32_in(precision: str) -> Iterator[None]:
    """Set the precision until the end of the block, however the block ends."""
    before = fp32_precision()
    set_fp32_precision(precision)
    try:
        yield
    finally:
        set_fp32_precision(before)


def tf32_remedy() -> str:
    """The line with which a program allows tf32."""
    import torch

    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        return 'torch.backends.cuda.matmul.fp32_precision = "tf32"'
    return "torch.backends.cuda.matmul.allow_tf32 = True"
