"""Gives dispatch the names that torch's functions have.

Users call `functions`. Traced code holds the operators of `ops`. `takeover` and `aten` serve ATen's products.
`linear` is the layer that `patch` installs, `lowering` tells Inductor how to call tunegemm, and `recording`
counts a program's products.
"""
