"""Tune: search the kernels of a problem on a device and store what was measured.

`tuner` tells the whole story on one page, `run` has its steps, `program` tunes all products of a program,
`verify` races stored records again. The room is not called `tune`, which is a public function.
Imports `describe`, `generate`, `measure`, `search` and `store`.
"""
