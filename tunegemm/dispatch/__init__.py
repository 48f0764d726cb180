"""Run time: `matmul` and its kin launch the recorded kernel of a problem, or leave it to torch."""

from tunegemm.dispatch.api import addmm, bmm, linear, matmul, policy, refresh

__all__ = ["addmm", "bmm", "linear", "matmul", "policy", "refresh"]
