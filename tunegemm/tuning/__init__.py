"""Tunes: searches the kernels of a problem on a device and stores the measurements.

`tuner` tells the whole story on one page; its steps are `begin`, `run`, `finalists` and `final`, with
`kernels` and `ahead` beside them. `program` tunes all products of a program, `verify` races stored records
again, `cluster` runs a tuner on each of several GPUs. The room is not called `tune`, which is a public
function. Imports `describe`, `generate`, `measure`, `search` and `store`.
"""
