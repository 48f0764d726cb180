"""Measures candidates on a real GPU, in a separate process that may die.

`worker` is the parent's side, `child` and its `session` the other, `messages` their protocol. `backend` knows
CUDA, `race` the order of rounds, `operands` data and correctness, `statistics` what samples mean, `evidence`
which results compare. `replay` answers from recorded `sweeps` where there is no GPU. Only the child loads
torch. Imports `describe` and `generate`; this file imports nothing, because dispatch starts through it.
"""
