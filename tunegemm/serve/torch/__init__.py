"""Connects dispatch to torch: `ops` has the operators, `autograd` their gradients, `takeover` has `enable`
and `patch`, through `aten` and `linear`; `lowering` serves Inductor, `fx` tracing, and `recording` counts a
program's products."""
