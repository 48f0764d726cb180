"""The grouped kernel in the CuTe DSL: start with `gemm.py`. Ring, layouts and raster are `cute_sm90`'s.

`gemm`: the launch, and what each warpgroup of a block becomes. `walk`: which tiles of which groups a block
takes, from the offsets on the device. `producer` fills the ring by TMA, `consumer` multiplies what is in it,
`epilogue` stores the rows of a group and no others.
"""
