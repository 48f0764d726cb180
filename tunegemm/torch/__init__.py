"""Dispatch under torch's names: users call `functions`; traced code holds the operators of `ops`.

`takeover` has `enable`, through `aten`; `linear` is the layer that `patch` makes, `lowering` tells Inductor
how to call us, and `recording` counts a program's products.
"""
