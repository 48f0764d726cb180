"""`TUNEGEMM_ENABLE` calls `enable` when a process or its children import torch, and reports the served
products.

It counts the products of ATen's calls, which costs some microseconds each.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tunegemm.choose.operators import OPERATORS
from tunegemm.choose.policies import read_switch
from tunegemm.describe.served import Served
from tunegemm.dispatch import api
from tunegemm.errors import TunegemmError
from tunegemm.groups.recorded_groups import dtype_of
from tunegemm.torch import takeover
from tunegemm.torch.processes import keep_writing

#: Names the folder in which each process of `tunegemm run` writes its counts.
PARTS = "TUNEGEMM_ENABLE_PARTS"

_Key = tuple[Any, ...]

#: Products to count separately, at some 500 B each. Further ones are counted together as one: a program with
#: ragged rows has a new product in every step.
MOST_PRODUCTS = 4096
_FURTHER: _Key = ()


class Counts:
    """The calls of each kind of product, and those that fell back to torch."""

    def __init__(self) -> None:
        self._calls: Counter[_Key] = Counter()
        self._fell_back: Counter[_Key] = Counter()
        self._inside = threading.local()  # set inside a kernel of torch's, which may call others

    def clear(self) -> None:
        self._calls.clear()
        self._fell_back.clear()

    def counting(
        self, name: str, make: Callable[[Any], Callable[..., Any]], kernel: Any
    ) -> Callable[..., Any]:
        """Wrap `make` for an operator to count its calls, and those that fall back to torch's kernel."""
        first, calls, fell_back, inside = OPERATORS[name].first, self._calls, self._fell_back, self._inside

        def by_torch(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
            if getattr(inside, "on", False):
                return kernel(keyset, *arguments, **keywords)
            fell_back[key_of(arguments)] += 1
            inside.on = True
            try:
                return kernel(keyset, *arguments, **keywords)
            finally:
                inside.on = False

        def key_of(arguments: tuple[Any, ...]) -> _Key:
            a, b = arguments[first : first + 2]
            key = a.shape, b.shape, a.dtype
            return key if key in calls or len(calls) < MOST_PRODUCTS else _FURTHER

        serve = make(by_torch)

        def counted(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
            if not getattr(inside, "on", False):
                calls[key_of(arguments)] += 1
            return serve(keyset, *arguments, **keywords)

        return counted

    def served(self) -> Served:
        """How many of the products so far ran a tuned kernel."""
        gains = gains_by_place()
        products = served = calls = served_calls = 0
        saved_us = 0.0
        for key, count in list(self._calls.items()):
            by_kernel = count - self._fell_back[key]
            products, calls, served_calls = products + 1, calls + count, served_calls + by_kernel
            served += by_kernel > 0
            if key:
                saved_us += by_kernel * gains.get(place_of(*key), 0.0)
        return Served(products, served, calls, served_calls, saved_us * 1e-6)


def serve_process() -> None:
    """Call `enable` until the process ends, in forked children, too.

    At the end it prints a line about served products, if there were any products. If `PARTS` is set, the
    process writes its counts there instead, and `tunegemm run` adds them up.
    """
    if not read_switch("TUNEGEMM_ENABLE", lambda line: print(f"tunegemm: {line}", file=sys.stderr)):
        return
    counts, folder = Counts(), os.environ.get(PARTS)
    try:
        takeover.begin(counts.counting)
    except TunegemmError as error:
        print(f"tunegemm: TUNEGEMM_ENABLE has no effect: {error}", file=sys.stderr)
        return

    def write() -> None:
        if folder and (served := counts.served()).calls:
            with suppress(OSError):
                Path(folder, f"{os.getpid()}.json").write_text(json.dumps(asdict(served)))

    def last() -> None:
        write()
        if not folder and (served := counts.served()).calls:
            print(f"tunegemm: {served} (process {os.getpid()})", file=sys.stderr)

    keep_writing(write=write, clear=counts.clear, last=last)


def gains_by_place() -> Mapping[_Key, float]:
    """What a call saves, in us, of each product that has a plan with a tuned kernel."""
    gains: dict[_Key, float] = {}
    for problem, record in api.dispatcher.planner.tuned():
        batch = (problem.batch,) if problem.batch > 1 else ()
        place = (*batch, problem.m, problem.k), (*batch, problem.k, problem.n), problem.in_dtype
        gain_us = record.median_us * (record.ratio - 1)
        if 0 < gain_us < float("inf"):
            gains[place] = gain_us
    return gains


def place_of(a: torch.Size, b: torch.Size, dtype: torch.dtype) -> _Key:
    return tuple(a), tuple(b), "tf32" if dtype is torch.float32 else dtype_of(dtype)
