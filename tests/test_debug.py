"""TILESTREAM_DEBUG=1: the values of cu_seqlens are checked where they are, and nothing waits for the answer."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilestream
from tilestream import api
from tilestream.problem import AttentionInputs, assert_cu_seqlens_values, check_cu_seqlens_values

# What CUDA takes of a message of an assertion.
_LONGEST_MESSAGE = 254


class Elsewhere(Tensor):
    """A tensor whose values cannot be read for free, as far as the checks know: no plain one."""


def _cu(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _packed(changes: dict[str, Any]) -> tuple[AttentionInputs, int | None, int | None]:
    """Valid sequences of 2 and 3 queries, 4 and 2 keys, with some arguments replaced; and max_seqlen_q, _k."""
    cu_seqlens = changes.get("cu_seqlens_q", _cu(0, 2, 5)), changes.get("cu_seqlens_k", _cu(0, 4, 6))
    query, key, value = torch.randn(5, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 3)
    inputs = AttentionInputs(query, key, value, changes.get("bias"), None, None, None, *cu_seqlens)
    return inputs, changes.get("max_seqlen_q"), changes.get("max_seqlen_k")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "starts_late": ({"cu_seqlens_q": _cu(1, 2, 5)}, "cu_seqlens_q must start at 0"),
    "starts_early": ({"cu_seqlens_k": _cu(-1, 4, 6)}, "cu_seqlens_k must start at 0"),
    "decreases": ({"cu_seqlens_k": _cu(0, 4, 3)}, "cu_seqlens_k must never decrease"),
    "overflows": ({"cu_seqlens_q": _cu(0, 2**31 - 1, -(2**31))}, "cu_seqlens_q must never decrease"),
    "beyond": ({"cu_seqlens_q": _cu(0, 2, 9)}, "cu_seqlens_q ends beyond the tokens"),
    "one_entry": ({"cu_seqlens_q": _cu(3), "cu_seqlens_k": _cu(0)}, "cu_seqlens_q must start at 0"),
    "max_seqlen_q": ({"max_seqlen_q": 2}, "max_seqlen_q is less than the longest sequence of cu_seqlens_q"),
    "max_seqlen_k": ({"max_seqlen_k": 3}, "max_seqlen_k is less than the longest sequence of cu_seqlens_k"),
    "bias_rows": ({"bias": torch.zeros(1, 1, 2, 1)}, "bias is too small for the longest sequence of cu_seqlens_q"),
    "bias_keys": ({"bias": torch.zeros(1, 1, 1, 3)}, "bias is too small for the longest sequence of cu_seqlens_k"),
}
RIGHT: dict[str, dict[str, Any]] = {
    "plain": {},
    "limits": {"max_seqlen_q": 3, "max_seqlen_k": 100},
    "empty_sequences": {"cu_seqlens_q": _cu(0, 0, 5, 5), "cu_seqlens_k": _cu(0, 6, 6, 6)},
    "tokens_left_over": {"cu_seqlens_q": _cu(0, 1, 2)},
    "no_sequence": {"cu_seqlens_q": _cu(0), "cu_seqlens_k": _cu(0), "max_seqlen_q": 0},
    "bias": {"bias": torch.zeros(1, 1, 3, 4)},
    "bias_broadcast": {"bias": torch.zeros(1, 1, 1, 1)},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named_by_both_checks(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(RuntimeError) as caught:
        assert_cu_seqlens_values(*_packed(changes))
    assert f"tilestream: {message}" in str(caught.value)
    assert len(str(caught.value)) <= _LONGEST_MESSAGE
    with pytest.raises(tilestream.TilestreamError):
        check_cu_seqlens_values(*_packed(changes))


@pytest.mark.parametrize("name", RIGHT)
def test_right_values_pass_both_checks(name: str) -> None:
    assert_cu_seqlens_values(*_packed(RIGHT[name]))
    check_cu_seqlens_values(*_packed(RIGHT[name]))


class _Recorded(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_by_the_host() -> None:
    """`.item()`, `bool()` and their kin are `_local_scalar_dense`; `.tolist()` and boolean indices are these others."""
    with _Recorded() as recorded:
        assert_cu_seqlens_values(*_packed(RIGHT["limits"]))
    assert "aten._assert_async.msg" in recorded.names
    assert not any(word in name for name in recorded.names for word in ("_local_scalar", "nonzero", "copy", "equal"))


def _call(cu_seqlens_q: Tensor, max_seqlen_q: int | None = None) -> Tensor:
    inputs, *_ = _packed({})
    assert inputs.cu_seqlens_k is not None
    query, key, value = inputs[:3]
    return tilestream.attention_varlen(
        query, key, value, cu_seqlens_q, inputs.cu_seqlens_k, max_seqlen_q=max_seqlen_q, backend="cpu"
    )


def test_a_call_checks_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "IS_DEBUGGING", True)
    assert _call(_cu(0, 2, 5).as_subclass(Elsewhere)).shape == (5, 4, 3)
    with pytest.raises(RuntimeError, match="tilestream: cu_seqlens_q ends beyond the tokens"):
        _call(_cu(0, 2, 9).as_subclass(Elsewhere))
    # What can be read is: the better message, with the numbers.
    with pytest.raises(tilestream.ArgumentError, match="ends at 9, beyond the 5 tokens"):
        _call(_cu(0, 2, 9))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_call_checks_in_its_graph(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "IS_DEBUGGING", True)
    torch.compiler.reset()
    compiled = torch.compile(_call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert compiled(_cu(0, 2, 5), 3).shape == (5, 4, 3)
    with pytest.raises(RuntimeError, match="tilestream: cu_seqlens_q must never decrease"):
        compiled(_cu(0, 3, 2), 3)
    with pytest.raises(RuntimeError, match="tilestream: max_seqlen_q is less than the longest sequence"):
        compiled(_cu(0, 1, 5), 3)


def test_meta_tensors_have_no_values_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "IS_DEBUGGING", True)
    packed, cu_seqlens = torch.zeros(5, 2, 8, device="meta"), _cu(0, 2, 5).to("meta")
    assert tilestream.attention_varlen(packed, packed, packed, cu_seqlens, cu_seqlens).shape == (5, 2, 8)


@pytest.mark.parametrize("setting", ["1", "0", "", None])
def test_the_variable_is_read_at_import(setting: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TILESTREAM_DEBUG"}
    if setting is not None:
        environment["TILESTREAM_DEBUG"] = setting
    code = "from tilestream import api; print(api.IS_DEBUGGING)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(setting == "1")


_ON_A_GPU = """
import torch, tilestream
packed = torch.randn(5, 2, 16, device="cuda")
right, wrong = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 2, 5], [1, 2, 5]))
torch.cuda.set_sync_debug_mode("error")
tilestream.attention_varlen(packed, packed, packed, right, right, max_seqlen_q=3, max_seqlen_k=3)
tilestream.attention_varlen(packed, packed, packed, right, wrong, max_seqlen_q=3, max_seqlen_k=3)
torch.cuda.set_sync_debug_mode("default")
print("launched", flush=True)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_a_gpu_says_what_is_wrong() -> None:
    """In a process of its own, whose device is lost."""
    environment = {**os.environ, "TILESTREAM_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_GPU], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "launched\n", done.stderr
    assert done.returncode != 0
    assert "cu_seqlens_k must start at 0" in done.stderr
