"""What torch asks of a call besides its operands: gradients, modes, transforms, autocast; and a check in C.

Everything here is on the hot path, or bound once for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tunegemm.describe.precision import fp32_precision

# Bound once: each is a call of 15-80 ns, where `torch.x.y` would cost as much again in look-ups.
grad_enabled = torch.is_grad_enabled
deterministic = torch._C._get_deterministic_algorithms
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
functorch_level = torch._C._functorch.peek_interpreter_stack
tracing = torch._C._is_tracing
any_autocast = torch._C._is_any_autocast_enabled
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)  # absent from CPU builds
# What `fp32_precision` asks, without a look-up.
_precision_of_fp32: Callable[[str, str], str] = getattr(
    torch._C, "_get_fp32_precision_getter", lambda *_: fp32_precision()
)

#: What `torch.backends.cuda.matmul.allow_*_reduced_precision_reduction` says of 16-bit operands: whether the
#: library may add up in 16 bits, and whether it may split k.
REDUCTIONS: dict[torch.dtype, Callable[[], Any]] = {
    torch.bfloat16: torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch.float16: torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
}

# What torch.compile's own code calls at run time: its guard of tensors, and its allocation. torch has no
# public ones that do as much in one call.
_TensorGuards: Any = torch._C._dynamo.guards.TensorGuards


def allocation(device_type: str) -> Any:
    """torch's own function of (shape, strides, dtype) that makes a tensor there."""
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}")


#: What `cast_by_autocast` says where torch is to compute the product.
TORCHS: Any = object()


def is_ordinary(a: torch.Tensor, b: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a launch means here what torch.matmul means; tensors: of an epilogue.

    It does not under autograd (which is `autograd.Product`'s), forward-mode AD, functorch transforms,
    dispatch modes (fake tensors, FLOP counters), tracing, or when deterministic algorithms are asked for.
    """
    for tensor in tensors:
        if (tensor.requires_grad and grad_enabled()) or is_lazy(tensor):
            return False
    return (
        not (grad_enabled() and (a.requires_grad or b.requires_grad))
        and not deterministic()
        and not dispatch_modes()
        and functorch_level() is None
        and not tracing()
        and forward_ad._current_level < 0
        and not (a.is_neg() or b.is_neg() or a._is_zerotensor() or b._is_zerotensor())  # see `is_lazy`
    )


def are_functions_watched() -> bool:
    """Whether a `TorchFunctionMode` is on that may look at products.

    All may but that of ``torch.set_default_device`` and ``with torch.device(...)``, which is for functions
    that make tensors.
    """
    modes = map(torch._C._get_function_stack_at, range(function_modes()))
    return any(type(mode) is not DeviceContext for mode in modes)


def is_transformed() -> bool:
    """Whether torch.func or forward-mode AD looks on: their products are torch's."""
    return functorch_level() is not None or forward_ad._current_level >= 0


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether memory does not hold the values: negated or conjugated views, and zeros without memory."""
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def only_checks_operators() -> bool:
    """Whether the one dispatch mode that is on is torch's check that custom operators return no operand.

    Compiled code runs under it the first time (torch 2.11 to 2.13; `check_custom_op_aliasing` of functorch's
    configuration). It has nothing to look at where that code calls us, which is by a function.
    """
    if dispatch_modes() != 1:
        return False
    return type(_get_current_dispatch_mode()).__name__ == "_AnalyzeCustomOpInputOutputMode"


def reductions_allowed(dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether torch's library may add up products of these operands in 16 bits, and may split k."""
    said = REDUCTIONS[dtype]() if dtype in REDUCTIONS else True
    return said if isinstance(said, tuple) else (bool(said), True)


def check_of(tensors: tuple[torch.Tensor, ...], *, reductions: bool = False) -> Callable[..., bool]:
    """Whether tensors are, but for their values and addresses, what these are.

    reductions: whether what is done with them depends on `REDUCTIONS`, too.
    """
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    check: Callable[..., bool] = _TensorGuards(
        *distinct,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in distinct],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in distinct],
    ).check
    if len(distinct) < len(tensors):  # torch's check wants no tensor twice
        check = _check_of_repeated(tensors, check)
    if reductions:
        said, plainly = REDUCTIONS[tensors[0].dtype], check
        before = said()
        check = lambda *others: said() == before and plainly(*others)  # noqa: E731
    if tensors[0].dtype is torch.float32:  # kernels compute it in tf32, where the program allows that now
        allowed = tf32_allowed()
        return lambda *others: tf32_allowed() == allowed and check(*others)
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type):  # torch's check knows that, and not to what it casts
        cast = torch.get_autocast_dtype(device_type)
        return lambda *others: torch.get_autocast_dtype(device_type) is cast and check(*others)
    return check


def _check_of_repeated(tensors: tuple[torch.Tensor, ...], check: Callable[..., bool]) -> Callable[..., bool]:
    first = [next(i for i, other in enumerate(tensors) if other is tensor) for tensor in tensors]
    kept = sorted(set(first))

    def check_repeated(*others: torch.Tensor) -> bool:
        repeat = all(other is others[i] for other, i in zip(others, first, strict=True))
        return repeat and check(*(others[i] for i in kept))

    return check_repeated


def cast_by_autocast(a: torch.Tensor, b: torch.Tensor, *others: torch.Tensor) -> Any:
    """The dtype that autocast gives the operands, None where all have it, TORCHS where it is not to say."""
    device_type = a.device.type
    if not torch.is_autocast_enabled(device_type):
        return None
    cast = torch.get_autocast_dtype(device_type)
    if a.dtype is cast and b.dtype is cast and all(tensor.dtype is cast for tensor in others):
        return None
    castable = all(
        tensor.device.type == device_type and tensor.is_floating_point() and tensor.dtype is not torch.float64
        for tensor in (a, b, *others)
    )
    return cast if castable and not dispatch_modes() and not tracing() else TORCHS


def autocast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as autocast casts it. Weights that it casts once per `with` come from its cache."""
    if tensor.requires_grad and tensor.is_leaf and torch.is_autocast_cache_enabled():
        # The plainest operator that returns its operand as it was cast; on a CPU it is not.
        tensor = torch.einsum("...->...", tensor)
    return tensor.to(dtype)


def tf32_allowed() -> bool:
    """Whether torch's products of fp32 operands may be computed in tf32."""
    return _precision_of_fp32("cuda", "matmul") == "tf32"


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
