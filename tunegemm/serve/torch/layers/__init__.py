"""What `tunegemm.patch(model, fuse=True)` makes of layers: several products as one, or one with what follows.

`fuse` goes through a model; `recognise` says what its modules do, `shared` keeps the weights of layers
that are computed together, `steps` computes them, `modules` are the classes that call these, `report` says
what became of each layer.
"""
