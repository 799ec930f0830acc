"""Every name of Gluon that the kernels use: the names move between Triton 3.6 and 3.9, and this file with them."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

__all__ = [
    "GluonASTSource",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gl",
    "jit",
    "load_tile",
    "mbarrier",
    "store_tile",
    "store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# Names of Triton 3.9, where those of 3.6 only say that they are gone.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
