"""The Hopper kernel in the CuTe DSL: start with `gemm.py`, or before it with `../kernel_minimal.py`.

`gemm`: the launch, and what each warpgroup of a block becomes. `schedule`: which work units a cluster takes.
`ring`: the barriers of the shared-memory ring. `producer` fills it by TMA, `consumer` multiplies what is in
it by WGMMA, `epilogue` converts and stores, `fusion` is the epilogue's arithmetic, `split_k` and
`second_kernel` make the sums of a tile's k splits one. `layouts`: tensors, tiles and TMA boxes as the host
makes them. How tiles follow each other is in `generate/kernel_rasterization.py`.
"""
