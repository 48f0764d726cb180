"""Measures candidates on a real GPU, in a separate process that may die.

`worker` is the parent's side and has the messages, `session` is the child's. `backend` knows CUDA, `race` the
order of rounds, `operands` data and correctness, `statistics` samples, `evidence` the order of results.
`replay` answers from recorded `sweeps` on machines without a GPU. Only the child loads torch. Imports
`describe` and `generate`; this file imports nothing, because dispatch starts through it.
"""
