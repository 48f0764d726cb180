"""What calls cost the host, beside each other."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Between two synchronisations: fewer than the launch queue takes, so that no call waits for the GPU.
CALLS = 100


def best_us(calls: Mapping[str, Callable[[], Any]], rounds: int = 40) -> dict[str, float]:
    """Microseconds of each call in its best round.

    Rounds are short and many, and all calls take turns in them, since other work of the host comes and goes.
    """
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return best
