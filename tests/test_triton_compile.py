"""Triton kernels are compiled for GPUs that are not here: nothing spills, and the matrix units do the products.

What a row uses is in the failure's message. ``serial`` is what ptxas notes as C7515: it waits for every single product.
"""

from __future__ import annotations

import importlib.util
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compile_rows import ask
from sass import unwritten

_WORKER = Path(__file__).with_name("triton_compile_worker.py")
_NUM_WORKERS = 2


class Row(NamedTuple):
    """One kernel of one kind of call (`triton_compile_worker.problem_of`) on one GPU."""

    gpu: str
    kind: str
    dtype: str
    head_dim: int
    kernel: str

    @property
    def id(self) -> str:
        return "-".join(map(str, self))


def _rows(gpus: str, kind: str, dtype: str, head_dims: tuple[int, ...], kernels: str) -> list[Row]:
    return [Row(*row) for row in itertools.product(gpus.split(), [kind], [dtype], head_dims, kernels.split())]


# A kernel takes 1 to 8 seconds. float16 differs from bfloat16 in nothing but names.
ROWS = [
    *_rows("sm_90 sm_80 gfx942", "plain", "bfloat16", (64, 128, 256, 512), "forward query key"),
    *_rows("sm_90", "rich", "bfloat16", (64, 128), "forward query key bias"),
    *_rows("sm_90", "rich", "bfloat16", (256,), "query key"),
    *_rows("sm_80 gfx942", "rich", "bfloat16", (128,), "forward query key bias"),
    *_rows("sm_90", "decode", "bfloat16", (128,), "forward_splits combine"),
    *_rows("sm_90", "plain", "bfloat16", (64,), "exact_forward delta exact_query exact_key"),
    *_rows("gfx942", "rich", "bfloat16", (512,), "delta exact_key"),
    *_rows("sm_90", "plain", "float16", (64,), "forward"),
    *_rows("sm_90", "uneven", "float16", (40,), "forward query key exact_forward"),
    *_rows("sm_90 gfx942", "plain", "float32", (64,), "forward"),
    *_rows("gfx942", "plain", "float32", (64,), "query key"),
    *_rows("sm_90", "blocks", "bfloat16", (64,), "forward query key"),
    *_rows("sm_90", "blocks", "bfloat16", (128,), "forward key"),
    *_rows("sm_80", "blocks", "bfloat16", (64,), "key"),
    *_rows("gfx942", "blocks", "bfloat16", (64,), "forward"),
    *_rows("sm_90", "plain", "float32", (64, 128), "query_parts key_parts"),
    *_rows("sm_90", "plain", "float32", (128,), "delta split"),
]

# What is known to be less than it could be, with what it was when it was written down; a row that gets better goes.
KNOWN: dict[str, set[str]] = {
    # Measured fastest on an H200 all the same.
    "sm_90-plain-bfloat16-128-key": {"spills"},  # 128 bytes
    "sm_90-plain-float32-64-forward": {"spills"},  # 32 bytes
    "sm_90-plain-float32-128-query_parts": {"spills"},  # 8 bytes
    "sm_90-plain-float32-128-key_parts": {"spills"},  # 272 bytes
    # The word of bits and the next tile's place besides: to be measured against other tiles.
    "sm_90-blocks-bfloat16-128-forward": {"spills"},  # 16 bytes, none of them in the loop
    "sm_90-blocks-bfloat16-128-key": {"spills"},  # 272 bytes
    "sm_90-plain-bfloat16-256-key": {"serial", "spills"},  # 56 waits for 56 products, 152 bytes
    # Everything at once: larger tiles spill.
    "sm_90-rich-bfloat16-64-query": {"serial"},  # 10 waits for 10 products
    "sm_90-rich-bfloat16-64-key": {"serial"},  # 20 waits for 20 products
    "sm_90-rich-bfloat16-128-query": {"serial"},  # 18 waits for 18 products
    "sm_90-rich-bfloat16-128-key": {"no_wgmma"},
    # Everything at once with wide heads, where tiles that fit into registers are too low for wgmma, or wait for it.
    "sm_90-rich-bfloat16-256-query": {"serial"},  # 65 waits for 65 products
    "sm_90-rich-bfloat16-256-key": {"no_wgmma"},
    # The widest heads there are.
    "sm_90-plain-bfloat16-512-key": {"no_wgmma"},
    "gfx942-plain-bfloat16-512-query": {"spills"},  # 88 bytes
    "gfx942-plain-bfloat16-512-key": {"spills"},  # 192 bytes
    "gfx942-rich-bfloat16-512-delta": {"spills"},  # 420 bytes
}

_WITHOUT_PRODUCTS = ("delta", "combine", "split")


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> dict[Row, dict[str, Any]]:
    """What every row uses, from `_NUM_WORKERS` processes side by side."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    folder = tmp_path_factory.mktemp("rows")
    shares = [ROWS[start::_NUM_WORKERS] for start in range(_NUM_WORKERS)]
    with ThreadPoolExecutor(_NUM_WORKERS) as workers:
        found = list(
            workers.map(
                ask, [_WORKER] * _NUM_WORKERS, shares, [folder / f"{index}.json" for index in range(_NUM_WORKERS)]
            )
        )
    return {row: use for share in found for row, use in share.items()}


def faults(row: Row, use: dict[str, Any]) -> set[str]:
    """What is wrong with the binary of a row."""
    is_half, has_products = row.dtype != "float32", row.kernel not in _WITHOUT_PRODUCTS
    is_rare = row.kernel.startswith("exact_")
    wgmma, mma = use.get("wgmma", 0), use["mma"]
    found = {
        "shared": use["shared"] > use["shared_limit"],
        # Wrong, where other faults are waste.
        "unwritten": bool(use.get("unwritten")),
        # A kernel that runs where numbers are not finite may be slow there.
        "spills": use["spilled"] > 0 and not is_rare,
        "scalar": has_products and is_half and wgmma + mma == 0,
        # The 16 rows of a decoding tile are too few for it, and the 32 keys of an exact one.
        "no_wgmma": has_products
        and is_half
        and row.gpu == "sm_90"
        and wgmma == 0 < mma
        and row.kind != "decode"
        and not is_rare,
        "serial": wgmma > 0 and 2 * use["waits"] >= wgmma and not is_rare,
    }
    return {fault for fault, is_there in found.items() if is_there}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_compiles_without_waste(row: Row, uses: dict[Row, dict[str, Any]]) -> None:
    assert "error" not in uses[row], uses[row]["error"]
    assert faults(row, uses[row]) == KNOWN.get(row.id, set()), f"{row.id}: {uses[row]}"


def test_a_register_that_nothing_has_written_is_noticed() -> None:
    right = """
        /*0010*/                   S2UR UR5, SR_CgaCtaId ;
        /*0020*/                   UMOV UR4, 0x400 ;
        /*0030*/                   ULEA UR14, UR5, UR4, 0x18 ;
        /*0040*/               @P0 BRA 0x60 ;
        /*0050*/                   UIADD3 UR34, UP0, UR14, 0x40, URZ ;
        /*0060*/                   UIADD3.X UR35, URZ, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0070*/                   HGMMA.64x32x16.F32 R56, R28, gdesc[UR32].tnspB, R56 ;
    """
    assert unwritten(right) == []
    for wrong, found in (
        (right.replace("UR14, 0x40", "UR34, 0x40"), ["0050: UIADD3 UR34, UP0, UR34, 0x40, URZ"]),
        (right.replace("R28, ", ""), ["0070: HGMMA.64x32x16.F32 R56, gdesc[UR32].tnspB, R56"]),
        (right.replace("UIADD3.X", "UIADD3.64"), []),
    ):
        assert unwritten(wrong) == found


def test_known_faults_are_of_rows() -> None:
    assert KNOWN.keys() <= {row.id for row in ROWS}
    assert len(set(ROWS)) == len(ROWS)
