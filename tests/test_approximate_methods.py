"""The contestants of ``tilestream bench approximate`` against their definitions; its gate and its errors."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from approximate import CPU, SMALL, changed, layers_of, needs
from torch import Tensor

from tilestream import BlockMask, dispatch
from tilestream.bench.approximate import cells, checks, packages
from tilestream.bench.approximate.cells import METHODS
from tilestream.bench.approximate.methods import Prepared
from tilestream.bench.approximate.setting import LAYOUTS, Setting
from tilestream.bench.approximate.states import load_states, save_states
from tilestream.errors import ArgumentError
from tilestream.problem import Problem

EXACT_OVER_BLOCKS = [name for name, method in METHODS.items() if method.kind != "approximate"]


def run(prepared: Prepared, setting: Setting, *tensors: Tensor) -> Tensor:
    """out (B, N, H, D) of query, key, value in that shape."""
    with torch.no_grad():
        out = prepared.forward(*(prepared.layout.pack(setting, tensor) for tensor in tensors))
    return prepared.layout.unpack(setting, out)


def inputs_of(setting: Setting) -> list[Tensor]:
    return list(setting.make_inputs(CPU)[:3])


# ---- the methods against their definitions


def test_linformer_that_projects_nothing_is_exact() -> None:
    needs("linformer")
    prepared = packages.linformer(SMALL, CPU, num_keys=SMALL.seqlen)
    for projection in prepared.parameters:
        projection.data.copy_(torch.eye(SMALL.seqlen))
    query, key, value = inputs_of(SMALL)
    torch.testing.assert_close(run(prepared, SMALL, query, key, value), checks.exact_attention(query, key, value))


def test_linformer_projects_keys_and_values_along_the_sequence() -> None:
    needs("linformer")
    prepared = packages.linformer(SMALL, CPU, num_keys=32)
    query, key, value = inputs_of(SMALL)
    keys, values = (
        torch.einsum("bnhd,nk->bkhd", tensor, projection)
        for tensor, projection in zip((key, value), prepared.parameters, strict=True)
    )
    torch.testing.assert_close(run(prepared, SMALL, query, key, value), checks.exact_attention(query, keys, values))


def test_nystrom_with_a_landmark_per_token_is_exact() -> None:
    """Where its iteration, which inverts the attention matrix in six steps, has an easy one: tokens see themselves."""
    needs("nystrom")
    setting = dataclasses.replace(SMALL, seqlen=16)
    query = 8 * torch.eye(16, dtype=torch.float64)[None, :, None].expand(2, -1, 2, -1)
    value = inputs_of(setting)[2]
    prepared = packages.nystrom(setting, CPU, num_landmarks=16)
    torch.testing.assert_close(run(prepared, setting, query, query, value), checks.exact_attention(query, query, value))


def test_nystrom_is_its_formula() -> None:
    """Softmax of three kernels, the middle one inverted; landmarks are means of neighbours."""
    needs("nystrom")
    setting = dataclasses.replace(SMALL, batch=1, num_heads=1, seqlen=32)
    query, key, value = inputs_of(setting)
    # Landmarks that are far apart make the inverse easy.
    query = query + 8 * torch.eye(16, dtype=torch.float64)[torch.arange(32) // 8][None, :, None]
    key = key + 8 * torch.eye(16, dtype=torch.float64)[torch.arange(32) // 8][None, :, None]
    out = run(packages.nystrom(setting, CPU, num_landmarks=4), setting, query, key, value)
    q, k, v = (tensor[0, :, 0] for tensor in (query, key, value))
    q_means, k_means = (tensor.unflatten(0, (4, 8)).mean(1) for tensor in (q, k))
    first, middle, last = (
        torch.softmax(a @ b.T / 4, dim=-1) for a, b in ((q, k_means), (q_means, k_means), (q_means, k))
    )
    torch.testing.assert_close(out[0, :, 0], first @ torch.linalg.inv(middle) @ (last @ v))


def test_local_attention_in_one_window_is_exact() -> None:
    needs("local")
    query, key, value = inputs_of(SMALL)
    found = run(packages.local(SMALL, CPU, window=SMALL.seqlen), SMALL, query, key, value)
    torch.testing.assert_close(found, checks.exact_attention(query, key, value))


def test_local_attention_is_exact_over_the_blocks_that_it_names() -> None:
    needs("local")
    prepared = packages.local(SMALL, CPU, window=32)
    assert prepared.kept is not None
    shown = prepared.kept.to_dense()[0, 0]
    assert shown.sum() == (4 + 2 * 3) * 32 * 32
    query, key, value = inputs_of(SMALL)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)), attn_mask=shown
    ).transpose(1, 2)
    torch.testing.assert_close(run(prepared, SMALL, query, key, value), wanted)


def test_reformer_whose_buckets_see_all_is_exact_over_shared_queries_and_keys() -> None:
    """One round of two buckets, each of which sees the other; the key it is given makes no difference."""
    needs("reformer")
    prepared = packages.reformer(SMALL, CPU, bucket_size=SMALL.seqlen // 2, num_rounds=1)
    query, key, value = inputs_of(SMALL)
    found = run(prepared, SMALL, query, key, value)
    torch.testing.assert_close(found, checks.shared_qk_attention(query, key, value))
    torch.testing.assert_close(run(prepared, SMALL, query, key + 1, value), found)


def test_shared_qk_attention_is_softmax_of_unit_keys_without_oneself() -> None:
    query, key, value = inputs_of(SMALL)
    found = checks.shared_qk_attention(query, key, value)
    i, others = 5, [j for j in range(SMALL.seqlen) if j != 5]
    q, v = query[1, :, 1], value[1, :, 1]
    s = (q[others] / q[others].norm(dim=1, keepdim=True)) @ q[i] / 4
    torch.testing.assert_close(found[1, i, 1], torch.softmax(s, dim=0) @ v[others])


def test_performer_comes_nearer_with_more_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unbiased features: the error falls with the square root of their number, by 8 with 64 times as many.

    Without what biases those of the package: the number that it adds to each for stability, and the signs of its
    directions, which are LAPACK's choice and not random.
    """
    needs("performer")
    module = importlib.import_module("performer_pytorch.performer_pytorch")
    monkeypatch.setattr(module, "softmax_kernel", functools.partial(module.softmax_kernel, eps=0))
    directions = module.gaussian_orthogonal_random_matrix

    def with_random_signs(**options: Any) -> Tensor:
        found: Tensor = directions(**options)
        return found * (torch.randint(0, 2, (len(found), 1)) * 2 - 1)

    monkeypatch.setattr(module, "gaussian_orthogonal_random_matrix", with_random_signs)
    query, key, value = inputs_of(SMALL)
    query, key = query / 2, key / 2
    wanted = checks.exact_attention(query, key, value)
    errors = []
    for num_features in (256, 16384):
        prepared = packages.performer(SMALL, CPU, num_features)
        errors.append(float((run(prepared, SMALL, query, key, value) - wanted).norm() / wanted.norm()))
    assert errors[1] < errors[0] / 4
    assert errors[1] < 0.1


def test_block_masks_are_what_they_are_called() -> None:
    butterfly, longformer, bigbird = (cells.METHODS[name] for name in ("butterfly", "longformer", "bigbird"))
    kept = [method.prepare(Setting(1, 2048), CPU).kept for method in (butterfly, longformer, bigbird)]
    assert all(isinstance(mask, BlockMask) for mask in kept)
    # 16 blocks a side: log2(16) + 1 in each row of a butterfly.
    assert kept[0].to_blocks().sum(-1).unique().tolist() == [5]  # type: ignore[union-attr]
    visible = kept[1].to_dense()[0, 0]  # type: ignore[union-attr]
    assert visible[:128].all()
    assert visible[:, :128].all()
    assert visible[1024].nonzero().flatten().tolist() == [*range(128), *range(1024 - 256, 1024 + 257)]
    assert kept[2].to_blocks()[0, 0, 1:].sum(-1).max() <= 7  # type: ignore[union-attr]


# ---- what a method says of itself


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("reformer", "tilestream-plain")])
def test_padding_is_hidden_by_those_who_say_so(name: str) -> None:
    setting = dataclasses.replace(SMALL, is_padded=True, dtype="float32")
    prepared = needs(name).prepare(setting, CPU)
    is_token = setting.is_token(CPU)
    assert not is_token.all()
    assert is_token[0].sum() != is_token[1].sum()
    query, key, value = inputs_of(setting)
    before = run(prepared, setting, query, key, value)
    for tensor in (key, value):
        tensor[~is_token] += 3
    after = run(prepared, setting, query, key, value)
    is_same = torch.equal(before[is_token], after[is_token])
    assert is_same == (prepared.padding != "no")


@pytest.mark.parametrize("name", list(METHODS))
def test_dropout_is_done_by_those_who_say_so(name: str) -> None:
    setting = dataclasses.replace(SMALL, dtype="float32")
    dropped = dataclasses.replace(setting, dropout_p=0.5)
    method = needs(name)
    tensors = inputs_of(setting)
    without, prepared = method.prepare(setting, CPU), method.prepare(dropped, CPU)
    # A seed for hashes and such, which are drawn at each call.
    torch.manual_seed(1)
    before = run(without, setting, *tensors)
    torch.manual_seed(1)
    after = run(prepared, dropped, *tensors)
    assert torch.equal(before, after) == (prepared.dropout == "no")


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_method_has_gradients_in_its_dtype(name: str, dtype: str) -> None:
    setting = dataclasses.replace(SMALL, dtype=dtype, dropout_p=0.1, is_padded=True, head_dim=32)
    prepared = needs(name).prepare(setting, CPU)
    leaves = [prepared.layout.pack(setting, tensor).requires_grad_() for tensor in inputs_of(setting)]
    out = prepared.forward(*leaves)
    assert out.dtype == getattr(torch, dtype)
    gradients = torch.autograd.grad(out.float().sum(), (*leaves, *prepared.parameters), allow_unused=True)
    assert [gradient is None for gradient in gradients[:3]] == [False, name == "reformer", False]
    for tensor in (out, *(gradient for gradient in gradients if gradient is not None)):
        assert tensor.isfinite().all()


def explained(serves: Callable[[Problem], bool], other: str | None) -> Callable[..., dispatch.Explanation]:
    """What dispatch would say where Triton's kernels serve some problems, and `other` the rest."""

    def explain(problem: Problem, backend: str | None = None) -> dispatch.Explanation:
        if serves(problem):
            return dispatch.Explanation("triton", (("triton", None), ("cpu", None)))
        return dispatch.Explanation(other, (("triton", "not this one"), ("cpu", None)))

    return explain


def test_on_a_gpu_tiled_operations_are_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "explain", explained(lambda problem: problem.block_mask is None, "cpu"))
    setting, gpu = Setting(2, 256), torch.device("cuda")
    assert METHODS["tilestream"].refuse(setting, gpu) is None
    assert METHODS["butterfly"].refuse(setting, gpu) == "no GPU kernel takes it: triton: not this one"
    assert METHODS["butterfly"].refuse(setting, CPU) is None


@pytest.mark.parametrize(
    ("serves", "dropout", "padding"),
    [
        (lambda problem: True, "yes", "packed"),
        (lambda problem: problem.layout == "dense", "yes", "no"),
        (lambda problem: problem.spec.dropout_p == 0, "no", "packed"),
        (lambda problem: problem.spec.dropout_p == 0 and problem.layout == "dense", "no", "no"),
        (lambda problem: problem.spec.dropout_p == 0 or not problem.is_backward, "no", "packed"),
    ],
)
def test_a_kernel_without_dropout_or_packing_runs_without_and_says_so(
    serves: Callable[[Problem], bool], dropout: str, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "explain", explained(serves, None))
    setting = Setting(2, 256)
    assert METHODS["butterfly"].refuse(setting, CPU) is None
    prepared = METHODS["butterfly"].prepare(setting, CPU)
    assert (prepared.dropout, prepared.padding, prepared.details["backend"]) == (dropout, padding, "triton")


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_layouts_lead_back(name: str) -> None:
    setting = dataclasses.replace(SMALL, is_padded=True)
    layout, tensor = LAYOUTS[name], inputs_of(setting)[0]
    packed = layout.pack(setting, tensor)
    assert packed.is_contiguous()
    tensor[~setting.is_token(CPU)] = 0
    torch.testing.assert_close(layout.unpack(setting, layout.pack(setting, tensor)), tensor, rtol=0, atol=0)


def test_sequences_differ_a_little() -> None:
    for seqlen in (4, 128, 65536):
        lengths = Setting(16, seqlen).lengths
        assert min(lengths) >= max(seqlen - 20, seqlen * 3 // 4)
        assert max(lengths) < seqlen
    assert len(set(Setting(16, 128).lengths)) == 16
    assert Setting(16, 128).lengths[:2] == Setting(2, 128).lengths


# ---- the gate, and errors on real states


@pytest.mark.parametrize("name", EXACT_OVER_BLOCKS)
def test_exact_methods_pass_the_gate(name: str) -> None:
    setting = Setting(3, 640, num_heads=2, head_dim=16)
    verdict = checks.check(METHODS[name], setting, CPU, setting.make_inputs(CPU))
    assert verdict.is_green, verdict.reason


@pytest.mark.parametrize(
    ("name", "change", "wrong"),
    [
        ("tilestream", lambda prepared: {"forward": lambda *qkv: 1.001 * prepared.forward(*qkv)}, "out is off"),
        ("tilestream", lambda prepared: {"seed": 1}, "out is off"),
        ("tilestream", lambda prepared: {"forward": lambda q, k, v: prepared.forward(q, k, v.detach() + 0 * v)}, "dv"),
        ("butterfly", lambda prepared: {"kept": None}, "out is off"),
        ("materialised", lambda prepared: {"padding": "no"}, "out is off"),
    ],
)
def test_the_gate_finds_what_is_wrong(name: str, change: Callable[[Prepared], dict[str, Any]], wrong: str) -> None:
    setting = Setting(2, 640, num_heads=2, head_dim=16)
    verdict = checks.check(changed(name, change), setting, CPU, setting.make_inputs(CPU))
    assert wrong in str(verdict.reason)


def test_states_come_back_from_their_file(tmp_path: Path) -> None:
    layers = layers_of()
    save_states(tmp_path / "states.pt", layers)
    found = load_states(tmp_path / "states.pt")
    assert [(one.model, one.layer, one.is_causal) for one in found] == [
        ("one", 0, True),
        ("one", 1, True),
        ("two", 0, False),
    ]
    for one, other in zip(found, layers, strict=True):
        for name in ("query", "key", "value"):
            assert torch.equal(getattr(one, name), getattr(other, name))
    query, key, _ = found[0].heads(100, torch.float32, CPU)
    assert query.shape == key.shape == (1, 100, 4, 16)
    assert torch.equal(key[0, :, 1], layers[0].key[:100, 0].float())
    assert torch.equal(key[0, :, 2], layers[0].key[:100, 1].float())


@pytest.mark.parametrize(
    "content",
    [
        b"no archive",
        {"format": 2, "layers": [1]},
        {"format": 1, "layers": []},
        {"format": 1, "layers": [{"model": "x"}]},
        3,
    ],
)
def test_what_is_no_file_of_states_is_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "states.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ArgumentError, match="is no file of states"):
        load_states(path)
    with pytest.raises(ArgumentError, match="cannot read --states"):
        load_states(tmp_path / "nothing")


def test_errors_of_exact_methods_are_rounding_and_hidden_mass_is_what_a_mask_leaves_out() -> None:
    layer = layers_of()[0]
    truth = checks.Truth(layer, 256, CPU)
    exact = checks.errors_on(METHODS["tilestream"], truth)
    assert exact.error < 1e-6
    assert exact.hidden_mass is None
    sparse = checks.errors_on(METHODS["butterfly"], truth)
    query, key, value = layer.heads(256, torch.float64, CPU)
    shown = METHODS["butterfly"].prepare(Setting(1, 256, 4, 16), CPU).kept.to_dense()  # type: ignore[union-attr]
    p = torch.softmax(torch.einsum("bihd,bjhd->bhij", query, key) / 4, dim=-1)
    assert sparse.hidden_mass == pytest.approx(float((p * ~shown).sum(-1).mean()), abs=1e-6)
    kept = p * shown / (p * shown).sum(-1, keepdim=True)
    wanted, found = (torch.einsum("bhij,bjhd->bihd", weights, value) for weights in (p, kept))
    assert sparse.error == pytest.approx(float((found - wanted).norm() / wanted.norm()), rel=1e-5, abs=1e-6)
    worst = max(float((found - wanted)[:, :, h].norm() / wanted[:, :, h].norm()) for h in range(4))
    assert sparse.worst_head == pytest.approx(worst, rel=1e-5, abs=1e-6)
