"""Checks of torch's state around a call: gradients, modes, transforms, autocast; and a tensor check in C.

Everything here runs on the hot path, or is bound once for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tunegemm.describe.precision import fp32_precision
from tunegemm.errors import OperandError, ProblemError

#: Subclasses (fake tensors, DTensor, quantized and user-made ones) give torch.matmul their own meaning.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

# They raise TypeError for what is no tensor, which then goes to torch's function: that raises torch's error.
data_ptr = torch.Tensor.data_ptr
rank = torch.Tensor.dim
num_elements = torch.Tensor.numel
# Bound once: each call takes 15-80 ns, and the look-ups of `torch.x.y` would double that.
grad_enabled = torch.is_grad_enabled
deterministic = torch._C._get_deterministic_algorithms
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
functorch_level = torch._C._functorch.peek_interpreter_stack
tracing = torch._C._is_tracing
any_autocast = torch._C._is_any_autocast_enabled
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)  # absent from CPU builds
# The getter behind `fp32_precision`, without its look-up.
_precision_of_fp32: Callable[[str, str], str] = getattr(
    torch._C, "_get_fp32_precision_getter", lambda *_: fp32_precision()
)

#: Getters of `torch.backends.cuda.matmul.allow_*_reduced_precision_reduction` for 16-bit operands: whether
#: the library may add up in 16 bits, and whether it may split k.
REDUCTIONS: dict[torch.dtype, Callable[[], Any]] = {
    torch.bfloat16: torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch.float16: torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
}

# The tensor guard and the allocation function that torch.compile's own code calls at run time. torch has no
# public functions that do as much in one call.
_TensorGuards: Any = torch._C._dynamo.guards.TensorGuards


def allocation(device_type: str) -> Any:
    """torch's own function that makes a tensor on this type of device, from (shape, strides, dtype)."""
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{device_type}")


#: `cast_by_autocast` returns this if torch must compute the product.
TORCHS: Any = object()


def check_tensors(**values: Any) -> None:
    """Raises OperandError, which names it, for a value that is not a tensor."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise OperandError(f"{name} is a {type(value).__name__}; give a tensor")


def check_devices(**tensors: torch.Tensor | None) -> None:
    """Raises ProblemError for tensors that are not all on one device."""
    places = {name: each.device for name, each in tensors.items() if each is not None}
    if len(set(places.values())) > 1:
        shown = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise ProblemError(f"{shown.replace(' on ', ' is on ', 1)}; give all on one device")


def is_ordinary(a: torch.Tensor, b: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a launch has the same meaning here as torch.matmul: as `are_plain`, but for classes, and
    without gradients, which `autograd.Product` handles. tensors: the epilogue's. Spelled out: a call would
    cost every call of a new key and every fused MLP.
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


def are_plain(*operands: torch.Tensor | None) -> bool:
    """Whether kernels may compute a call with these operands: no subclasses, no modes (fake tensors, FLOP
    counters), transforms, forward-mode AD or tracing, and no request for deterministic algorithms."""
    for each in operands:  # at each call: a generator would take as long again
        if each is not None and type(each) not in PLAIN:
            return False
    return not (
        deterministic()
        or dispatch_modes()
        or functorch_level() is not None
        or tracing()
        or forward_ad._current_level >= 0
        or (function_modes() and are_functions_watched())
    )


def has_gradient(*operands: torch.Tensor | None) -> bool:
    """Whether the product of these operands needs a gradient."""
    return grad_enabled() and any(each is not None and each.requires_grad for each in operands)


def are_torchs(*operands: torch.Tensor | None) -> bool:
    """Whether no subclass gives operands of a traced call a meaning of its own."""
    return torch.compiler.is_exporting() or all(
        each is None or type(each) in PLAIN or isinstance(each, FakeTensor) for each in operands
    )


def are_functions_watched() -> bool:
    """Whether an active `TorchFunctionMode` may intercept products.

    Any mode may, except the mode of ``torch.set_default_device`` and ``with torch.device(...)``, which only
    concerns functions that make tensors.
    """
    modes = map(torch._C._get_function_stack_at, range(function_modes()))
    return any(type(mode) is not DeviceContext for mode in modes)


def is_transformed() -> bool:
    """Whether torch.func or forward-mode AD is active: torch then computes the product."""
    return functorch_level() is not None or forward_ad._current_level >= 0


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether memory does not hold the values: negated or conjugated views, and zeros without memory."""
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def only_checks_operators() -> bool:
    """Whether the only active dispatch mode is the one by which torch checks that operators alias no input.

    Compiled code first runs under it (torch 2.11 to 2.13; `check_custom_op_aliasing` of functorch's
    configuration). It does not concern our calls: compiled code calls us by a function, not an operator.
    """
    if dispatch_modes() != 1:
        return False
    return type(_get_current_dispatch_mode()).__name__ == "_AnalyzeCustomOpInputOutputMode"


def reductions_allowed(dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether torch's library may add up products of these operands in 16 bits, and may split k."""
    said = REDUCTIONS[dtype]() if dtype in REDUCTIONS else True
    return said if isinstance(said, tuple) else (bool(said), True)


def check_of(tensors: tuple[torch.Tensor, ...], *, reductions: bool = False) -> Callable[..., bool]:
    """A check that tensors match these in everything but values and addresses.

    reductions: whether the check also compares the settings of `REDUCTIONS`.
    """
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    check: Callable[..., bool] = _TensorGuards(
        *distinct,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in distinct],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in distinct],
    ).check
    if len(distinct) < len(tensors):  # torch's check does not accept a tensor twice
        check = _check_of_repeated(tensors, check)
    if reductions:
        said, plainly = REDUCTIONS[tensors[0].dtype], check
        before = said()
        check = lambda *others: said() == before and plainly(*others)  # noqa: E731
    if tensors[0].dtype is torch.float32:  # kernels compute in tf32 if the program allows it at that moment
        allowed = tf32_allowed()
        return lambda *others: tf32_allowed() == allowed and check(*others)
    device_type = tensors[0].device.type
    if torch.is_autocast_enabled(device_type):  # torch's check ignores the dtype of autocast
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
    """The dtype to which autocast casts the operands; None without a cast, TORCHS if torch must decide."""
    device_type = a.device.type
    if a.is_meta or not torch.is_autocast_enabled(device_type):  # which does not know meta
        return None
    cast = torch.get_autocast_dtype(device_type)
    if a.dtype is cast and b.dtype is cast and all(tensor.dtype is cast for tensor in others):
        return None
    castable = all(
        tensor.device.type == device_type and tensor.is_floating_point() and tensor.dtype is not torch.float64
        for tensor in (a, b, *others)
    )
    is_watched = dispatch_modes() or tracing() or functorch_level() is not None  # vmap casts parts of calls
    return cast if castable and not is_watched else TORCHS


def autocast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as autocast casts it. Weights come from autocast's cache, cast once per `with`."""
    if tensor.requires_grad and tensor.is_leaf and torch.is_autocast_cache_enabled():
        # The simplest operator that returns its operand as autocast casts it; on a CPU it is not cast.
        tensor = torch.einsum("...->...", tensor)
    return tensor.to(dtype)


def tf32_allowed() -> bool:
    """Whether torch's products of fp32 operands may be computed in tf32."""
    return _precision_of_fp32("cuda", "matmul") == "tf32"


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def has_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are known now: not in traced code, nor during a graph capture."""
    return not (
        tensor.device.type == "meta"
        or dispatch_modes()
        or functorch_level() is not None
        or tracing()
        or capturing(tensor.device)
    )
