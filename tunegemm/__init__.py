"""tunegemm: find, remember and dispatch the fastest matrix-product kernel for your GPU."""
