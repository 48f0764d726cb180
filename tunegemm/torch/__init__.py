"""Dispatch by torch's own names: `functions` are what users call, `ops` the operators that traced code holds
in their place. `takeover` has `enable`, through `aten`; `linear` is the layer that `patch` makes, `lowering`
tells Inductor how to call us, and `recording` counts a program's products."""
