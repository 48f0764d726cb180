"""Where torch meets dispatch: `ops` are its operators, `autograd` their gradients, `takeover` what `enable`
and `patch` replace, by `aten` and `linear`; `lowering` serves Inductor, `fx` tracing, `recording`
counts a program's products.
"""
