"""Layers of a model: what one kernel computes of the graph that Dynamo, Inductor or an engine has.

`patterns` declares what is recognised and what it becomes; `fusion` is the one pass over a graph; `sites`
are the calls that it puts there, which decide once per number of rows. `backend` is torch.compile's backend
`tunegemm`, `inductor` the same pass in Inductor, `modules` what `patch` does without a graph.
"""
