"""Run time: `matmul` and `linear`, which launch the recorded kernel of a problem or leave it to torch."""

from tunegemm.dispatch.api import linear, matmul, policy, refresh

__all__ = ["linear", "matmul", "policy", "refresh"]
