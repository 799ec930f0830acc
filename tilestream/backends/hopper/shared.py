"""What kernels have in shared memory: barriers, and places for tiles."""

from __future__ import annotations

from tilestream.backends.hopper.gluon_names import gl, jit, mbarrier

__all__ = ["barriers", "tiles_like"]


@jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """So many barriers that open at so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(NUMBER):
        mbarrier.init(made.index(index), count=COUNT)
    return made


@jit
def tiles_like(NUMBER: gl.constexpr, desc):
    """Places for so many tiles of a descriptor."""
    shape: gl.constexpr = [NUMBER] + desc.block_shape  # noqa: RUF005  # Triton knows no starred lists
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
