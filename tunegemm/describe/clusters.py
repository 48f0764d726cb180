"""Where a GPU puts thread block clusters: how many run at once, and which share a GPC.

A graphics processing cluster (GPC) merges its multiprocessors' reads of the same lines of L2 if they come at
about the same time; it does not merge multicasts (H200, 2026-11-22). The hardware gives a grid's clusters to
one GPC after the other, in the same order each time on an idle device, so clusters with neighbouring indices
lie apart. CUDA reports neither fact, so this module measures them. The result only decides which cluster
computes which tile: if it is wrong, kernels are slower and still correct.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tunegemm.describe.driver import primary_context

#: Writes the multiprocessor of every block. Each block stays 20 us, so that no two share a multiprocessor.
PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry whereabouts(.param .u64 out)
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .b64 %d<6>;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra done;
    ld.param.u64 %d1, [out];
    cvta.to.global.u64 %d1, %d1;
    mov.u32 %r2, %ctaid.z;
    mov.u32 %r3, %nctaid.x;
    mov.u32 %r4, %ctaid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    mul.wide.u32 %d2, %r5, 4;
    add.s64 %d1, %d1, %d2;
    mov.u32 %r6, %smid;
    st.global.u32 [%d1], %r6;
    mov.u64 %d3, %globaltimer;
    add.s64 %d3, %d3, 20000;
stay:
    mov.u64 %d4, %globaltimer;
    setp.lt.u64 %p2, %d4, %d3;
    @%p2 bra stay;
done:
    ret;
}
\0"""
_THREADS = 128
#: Cluster sizes that show which multiprocessors share a GPC. Large clusters show most of it, small ones the
#: multiprocessors that large ones leave over. More than 8 blocks need an attribute.
_SIZES = (16, 8, 6, 4)

_CLUSTER_DIMENSION = 4
_MAX_DYNAMIC_SMEM, _NON_PORTABLE_SIZE = 8, 14


class _ClusterDimension(ctypes.Structure):
    """`CUlaunchAttribute` of that kind, 72 bytes in cuda.h of CUDA 12 and 13."""

    _fields_ = (("id", ctypes.c_uint64), ("dimension", ctypes.c_uint32 * 3), ("unused", ctypes.c_uint32 * 13))


class _LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("smem_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_ClusterDimension)),
        ("num_attributes", ctypes.c_uint32),
    )  # fmt: skip


@functools.cache
def active_clusters(index: int, cluster_size: int, smem_bytes: int) -> int | None:
    """The driver's count for blocks with this much shared memory; None if the driver cannot be asked."""
    try:
        with loaded(index, smem_bytes) as (driver, function):
            return _most_active(driver, function, cluster_size, smem_bytes) or None
    except (OSError, RuntimeError):  # no context: the GPU's memory is full, or another process has it alone
        return None


def gpcs_of_clusters(index: int, cluster_size: int, clusters: int, smem_bytes: int) -> tuple[int, ...] | None:
    """The GPC number of each cluster of a grid whose blocks have this much shared memory.

    None if it cannot be measured, for example during a capture or beside other work. `clusters`: as many as
    run at once, or fewer.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        return None
    return gpcs_of_launches(index, cluster_size, clusters, smem_bytes)


def places_of(gpcs: Sequence[int]) -> tuple[int, ...]:
    """A place in the rasterization for each cluster, so that clusters of one GPC follow each other.

    GPCs with few clusters come first. The clusters that a chip has left over in several GPCs then fill
    whole blocks.
    """
    size = Counter(gpcs)
    order = sorted(range(len(gpcs)), key=lambda cluster: (size[gpcs[cluster]], gpcs[cluster], cluster))
    places = [0] * len(gpcs)
    for place, cluster in enumerate(order):
        places[cluster] = place
    return tuple(places)


def usual_neighbours(gpcs: Sequence[int]) -> int:
    """How many clusters share a GPC with a cluster, itself included: the median over all."""
    size = Counter(gpcs)
    # Not statistics.median_low: to import that costs a program's first call milliseconds.
    return sorted(size[gpc] for gpc in gpcs)[(len(gpcs) - 1) // 2]


@functools.cache
def gpcs_of_launches(index: int, cluster_size: int, clusters: int, smem_bytes: int) -> tuple[int, ...] | None:
    try:
        with loaded(index, smem_bytes) as (driver, function):
            results = [multiprocessors_of(driver, function, index, size, smem_bytes) for size in _SIZES]
            first, again = (
                multiprocessors_of(driver, function, index, cluster_size, smem_bytes, clusters)
                for _ in range(2)
            )
    except (OSError, RuntimeError):
        return None
    if not first or first != again:  # other work on the device displaces the clusters
        return None
    gpc_of = groups([cluster for clusters in results for cluster in clusters])
    return tuple(gpc_of.get(cluster[0], -1 - cluster[0]) for cluster in first)


def groups(clusters: Sequence[Sequence[int]]) -> dict[int, int]:
    """For each multiprocessor the lowest number among those in its GPC, as far as clusters reveal them."""
    least: dict[int, int] = {}
    for cluster in clusters:
        joined = {least.get(sm, sm) for sm in cluster}
        least |= dict.fromkeys(cluster, min(joined))
        for sm, other in least.items():
            if other in joined:
                least[sm] = min(joined)
    return least


def multiprocessors_of(
    driver: Any, function: ctypes.c_void_p, index: int, size: int, smem_bytes: int, clusters: int = 0
) -> list[list[int]]:
    """The multiprocessors that ran each cluster's blocks; by default for as many clusters as run at once.
    Empty if no cluster runs."""
    import torch

    clusters = clusters or _most_active(driver, function, size, smem_bytes)
    if not clusters:
        return []
    out = torch.full((clusters, size), -1, dtype=torch.int32, device=f"cuda:{index}")
    config = _launch_config(size, clusters, smem_bytes, torch.cuda.current_stream(index).cuda_stream)
    address = ctypes.c_uint64(out.data_ptr())
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    failed = driver.cuLaunchKernelEx(ctypes.byref(config), function, arguments, None)
    results: list[list[int]] = out.tolist()
    return [] if failed else results


def _most_active(driver: Any, function: ctypes.c_void_p, size: int, smem_bytes: int) -> int:
    """The driver's count of clusters that run at once; 0 without a count."""
    count, config = ctypes.c_int(), _launch_config(size, 1024, smem_bytes)
    failed = driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(config))
    return 0 if failed else max(0, count.value)


def _launch_config(size: int, clusters: int, smem_bytes: int, stream: int = 0) -> _LaunchConfig:
    """A grid as the kernels of `generate.cute_sm90` have it: clusters along its third mode."""
    cluster = _ClusterDimension(id=_CLUSTER_DIMENSION, dimension=(size, 1, 1))
    return _LaunchConfig(
        grid=(size, 1, clusters),
        block=(_THREADS, 1, 1),
        smem_bytes=smem_bytes,
        stream=stream or None,
        attributes=ctypes.pointer(cluster),
        num_attributes=1,
    )


@contextmanager
def loaded(index: int, smem_bytes: int) -> Iterator[tuple[Any, ctypes.c_void_p]]:
    """The driver and the kernel, in the device's primary context. Raises RuntimeError or OSError."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with primary_context(index) as driver:
        if driver.cuModuleLoadData(ctypes.byref(module), PTX):
            raise RuntimeError("the driver refuses the probe")
        try:
            if driver.cuModuleGetFunction(ctypes.byref(function), module, b"whereabouts"):
                raise RuntimeError("the driver cannot find the probe")
            driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SMEM, smem_bytes)
            driver.cuFuncSetAttribute(function, _NON_PORTABLE_SIZE, 1)
            yield driver, function
        finally:
            driver.cuModuleUnload(module)
