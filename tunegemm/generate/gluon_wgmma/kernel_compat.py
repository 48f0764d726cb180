"""What differs between the Gluons of Triton 3.6 to 3.9: the names of the TMA copies."""

from triton.experimental.gluon.language.nvidia.hopper import tma

# async_load and async_store came in 3.8, which deprecates the older names; 3.9 has no others that work.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
