"""``TUNEGEMM_MODE``: how far dispatch goes to serve a product. Read once, on the first product.

- ``off``: torch computes every product.
- ``exact``: recorded problems only.
- ``predict``, the default: also problems without a record, where measurements of others promise a gain: plain
  products by a fitted model (`choose.predictions`), others by recorded neighbours (`choose.neighbours`).
- ``online``: as ``predict``, and problems without a record are measured or tuned when the GPU is idle
  (`dispatch.online`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, cast, get_args

from tunegemm.choose.policies import FASTEST, Policy, parse_policy
from tunegemm.errors import PolicyError

Mode = Literal["off", "exact", "predict", "online"]
DEFAULT: Mode = "predict"


def read_mode(warn: Callable[[str], None]) -> Mode:
    """The mode that the environment asks for; an unknown one is a warning and the default."""
    mode = os.environ.get("TUNEGEMM_MODE", "") or DEFAULT
    if mode not in get_args(Mode):
        remedy = f"use one of {', '.join(get_args(Mode))} or unset it"
        warn(f"TUNEGEMM_MODE={mode!r} is not known and has no effect; {remedy}")
        return DEFAULT
    return cast(Mode, mode)


def read_compile(warn: Callable[[str], None]) -> bool:
    """``TUNEGEMM_COMPILE``: whether missing kernels are compiled meanwhile."""
    return _switch("TUNEGEMM_COMPILE", True, warn)


def read_summary(warn: Callable[[str], None]) -> bool:
    """``TUNEGEMM_SUMMARY``: whether products without a record are listed when the process ends."""
    return _switch("TUNEGEMM_SUMMARY", False, warn)


def read_engine(engine: str, warn: Callable[[str], None]) -> bool:
    """``TUNEGEMM_VLLM`` and its kin: whether an engine is served."""
    return _switch(f"TUNEGEMM_{engine.upper()}", True, warn)


def read_engine_gates(engine: str, warn: Callable[[str], None]) -> bool:
    """``TUNEGEMM_VLLM_GATES``: whether an engine's gates are made with the product of gate and up."""
    return _switch(f"TUNEGEMM_{engine.upper()}_GATES", True, warn)


def read_check_groups(warn: Callable[[str], None]) -> bool:
    """``TUNEGEMM_CHECK_GROUPS``: whether the ends of groups and experts' numbers are looked at."""
    return _switch("TUNEGEMM_CHECK_GROUPS", False, warn)


def _switch(name: str, default: bool, warn: Callable[[str], None]) -> bool:
    """A variable that is 0 or 1; what is neither is a warning, and the default."""
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        warn(f"{name}={text!r} is not known and has no effect; use 0 or 1 or unset it")
    return text == "1" if text in ("0", "1") else default


def read_policy(warn: Callable[[str], None]) -> Policy:
    """``TUNEGEMM_POLICY``, such as ``deterministic`` or ``fastest,max_sms=120``; a mistake is a warning."""
    try:
        return parse_policy(os.environ.get("TUNEGEMM_POLICY", ""))
    except PolicyError as error:
        warn(f"TUNEGEMM_POLICY: {error}; it has no effect")
        return FASTEST
