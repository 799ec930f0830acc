"""The PyTorch operators: schemas, fake kernels, autograd, vmap. One operator for dense and packed calls.

``tilestream::attention`` -> (out, lse); ``tilestream::attention_backward`` -> (dq, dk, dv, dbias, dsinks); and its
derivative ``tilestream::attention_double_backward``. A gradient that was not asked for is an empty tensor, because an
operator returns tensors only. The backward chooses its backend anew: (out, lse) mean the same on all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilestream import dispatch
from tilestream.block_mask import BlockMask
from tilestream.errors import UnsupportedError
from tilestream.problem import AttentionInputs, Gradients, Problem
from tilestream.spec import AttentionSpec, Band
from tilestream.state import AttentionOutput

__all__ = ["PLAIN_TYPES", "Known", "Numbers", "apply", "apply_known", "is_eager", "know"]

# Tensors without behaviour of their own: no fakes, no wrappers.
PLAIN_TYPES = (Tensor, torch.nn.Parameter)

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)
_NUM_INPUTS = len(AttentionInputs._fields)


class Numbers(NamedTuple):
    """Everything of a call that is not a tensor, in the order of the operators' arguments.

    A plain tuple, because torch.compile before 2.13 cannot trace the making of a dataclass.
    """

    left: int | None
    right: int | None
    shift: int | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    scale: float
    softcap: float
    dropout_p: float
    deterministic: bool
    backend: str | None
    block_mask: int | None = None  # a handle, because an operator takes no other objects

    def problem(self, inputs: AttentionInputs, *, is_backward: bool = False) -> Problem:
        """The problem that these numbers and tensors are."""
        if self.block_mask is not None:
            # Not remembered with its mask, which may be large.
            plain = self._replace(block_mask=None).problem(inputs, is_backward=is_backward)
            found = dataclasses.replace(plain, block_mask=BlockMask.from_handle(self.block_mask))
            # Always the same object, which is known to whatever remembers calls.
            vars(found)["without_mask"] = plain
            return found
        query, key, value, *_ = inputs
        has = (inputs.bias is not None, inputs.alibi_slopes is not None, inputs.sinks is not None)
        if inputs.cu_seqlens_q is None:
            return _dense_problem(
                self, has, query.shape, key.shape, value.shape[-1], query.dtype, query.device.type, is_backward
            )
        return Problem.from_inputs(
            inputs,
            self.spec(has),
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            is_backward=is_backward,
        )

    def spec(self, has: tuple[bool, bool, bool]) -> AttentionSpec:
        """What is computed; `has` a bias, slopes, sinks."""
        has_bias, has_alibi, has_sinks = has
        return AttentionSpec(
            band=Band(self.left, self.right),
            scale=self.scale,
            softcap=self.softcap,
            dropout_p=self.dropout_p,
            has_bias=has_bias,
            has_alibi=has_alibi,
            has_sinks=has_sinks,
            deterministic=self.deterministic,
        )


@functools.lru_cache(maxsize=256)  # making three dataclasses takes as long as attention over a few tokens
def _dense_problem(
    numbers: Numbers,
    has: tuple[bool, bool, bool],
    query_shape: torch.Size,
    key_shape: torch.Size,
    head_dim_v: int,
    dtype: torch.dtype,
    device_type: str,
    is_backward: bool,
) -> Problem:
    batch, seqlen_q, num_heads_q, head_dim = query_shape
    return Problem.dense(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=key_shape[1],
        num_heads_q=num_heads_q,
        num_heads_kv=key_shape[2],
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        device_type=device_type,
        spec=numbers.spec(has),
        shift=numbers.shift,
        is_backward=is_backward,
    )


_NUMBERS = (
    "SymInt? left, SymInt? right, SymInt? shift, SymInt? max_seqlen_q, SymInt? max_seqlen_k, float scale, "
    "float softcap, float dropout_p, bool deterministic, str? backend, SymInt? block_mask"
)


class Known(NamedTuple):
    """What holds for every call with one signature: the same arguments, and tensors of the same shapes and kinds."""

    numbers: Numbers
    forward: Callable[[AttentionInputs], AttentionOutput] | None = None  # `Backend.prepare`


def know(inputs: AttentionInputs, numbers: Numbers) -> Known:
    """`Known` of a validated call's signature."""
    problem = numbers.problem(inputs)
    return Known(numbers, dispatch.choose(problem, numbers.backend).prepare(problem, inputs))


def apply(inputs: AttentionInputs, numbers: Numbers) -> AttentionOutput:
    """Run the operator on validated inputs; differentiable in query, key, value, bias and sinks."""
    if not is_eager(inputs):
        return AttentionOutput(*_call("attention", *inputs, *numbers))
    return apply_known(inputs, Known(numbers))


def apply_known(inputs: AttentionInputs, known: Known) -> AttentionOutput:
    """`apply`, for inputs that `is_eager` holds for."""
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in inputs]):
        return AttentionOutput(*_EagerAttention.apply(*inputs, known))
    return _attend(inputs, known)


def is_eager(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nobody is there to see an operator: plain tensors, no transform, mode, trace or profiler.

    PyTorch's dispatch of an operator written in Python takes longer (30 us) than attention over a few tokens, or than
    the launch of a kernel.
    """
    if torch.compiler.is_compiling():
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN_TYPES or not (x.is_cuda or x.is_cpu) or x.layout is not torch.strided:
            return False
        # What the dispatcher makes real first: a lazily negated tensor, and one that stands for zeros.
        if x.is_neg() or x._is_zerotensor():
            return False
    return (
        forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._autograd._profiler_enabled()
        and torch._C._get_tracing_state() is None
    )


def _call(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    """Call an operator; under torch.func transforms through an autograd.Function, which those can differentiate."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.tilestream, name)(*arguments)  # type: ignore[no-any-return]
    # Operators drop forward-mode tangents without a word.
    if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in arguments):
        raise UnsupportedError("attention has no forward-mode derivative (jvp, jacfwd, hessian); use reverse mode.")
    if torch._C._are_functorch_transforms_active():
        results: tuple[Tensor, ...] = _FUNCTIONS[name].apply(*arguments)
        return results
    return getattr(torch.ops.tilestream, name)(*arguments)  # type: ignore[no-any-return]


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _split(arguments: tuple[Any, ...]) -> tuple[AttentionInputs, Numbers]:
    """Arguments of an operator, from `query` on, as tensors and numbers."""
    inputs = AttentionInputs(*arguments[:_NUM_INPUTS])
    return inputs, Numbers(*arguments[_NUM_INPUTS : _NUM_INPUTS + len(Numbers._fields)])


def _or_empty(gradient: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if gradient is None else gradient


def _lse_shape(query: Tensor) -> tuple[int, ...]:
    """(batch, heads, seqlen_q), or (heads, total_q) for packed calls."""
    return (*query.shape[:-3], query.shape[-2], query.shape[-3])


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


# ---- forward


def _attend(inputs: AttentionInputs, known: Known) -> AttentionOutput:
    if known.forward is not None:
        return known.forward(inputs)
    problem = known.numbers.problem(inputs)
    return dispatch.choose(problem, known.numbers.backend).forward(problem, inputs)


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, numbers = _split(arguments)
    return tuple(_attend(inputs, Known(numbers)))  # type: ignore[return-value]


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, value = arguments[0], arguments[2]
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    return out, query.new_empty(_lse_shape(query), dtype=_lse_dtype(query))


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, inputs[:_NUM_INPUTS], output, inputs[_NUM_INPUTS:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], numbers: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.numbers = numbers
    handle = numbers[-1]
    # The backward needs the mask, whatever the caller does with it. A traced graph cannot hold it.
    ctx.block_mask = BlockMask.from_handle(handle) if isinstance(handle, int) else None
    # A gradient of lse that nobody asked for stays None, which spares reading zeros.
    ctx.set_materialize_grads(False)


def _attention_autograd(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    num_gradients = _NUM_INPUTS + len(ctx.numbers)
    if dout is None and dlse is None:
        return (None,) * num_gradients
    needs_dbias, needs_dsinks = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
    dout = torch.zeros_like(out) if dout is None else dout
    arguments = (dout, dlse, *tensors, *ctx.numbers, out, lse, needs_dbias, needs_dsinks)
    # With gradients enabled the backward is itself to be differentiated.
    # `out` stands for what was saved.
    if not torch.is_grad_enabled() and is_eager((dout, dlse, out)):
        dq, dk, dv, dbias, dsinks = _gradients(*arguments)
    else:
        dq, dk, dv, dbias, dsinks = _call("attention_backward", *arguments)
    gradients = (dq, dk, dv, dbias if needs_dbias else None, None, dsinks if needs_dsinks else None)
    return gradients + (None,) * (num_gradients - len(gradients))


class _EagerAttention(torch.autograd.Function):
    """The operator's forward and derivative without the operator."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Of the operator's tensors, and what is known of the call."""
        inputs, known = AttentionInputs(*arguments[:-1]), arguments[-1]
        output = _attend(inputs, known)
        _save(ctx, inputs, output, known.numbers)
        return output.out, output.lse

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of (out, lse)."""
        return (*_attention_autograd(ctx, *cotangents)[:_NUM_INPUTS], None)


# ---- backward


def _gradients(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> Gradients:
    inputs, numbers = _split(arguments)
    out, lse, needs_dbias, needs_dsinks = arguments[-4:]
    problem = numbers.problem(inputs, is_backward=True)
    backend = dispatch.choose(problem, numbers.backend)
    output = AttentionOutput(out, lse)
    return backend.backward(problem, inputs, output, dout, dlse, needs_dbias, needs_dsinks)


def _backward(dout: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(_or_empty(gradient, dout) for gradient in _gradients(dout, *arguments))


def _backward_fake(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, _ = _split(arguments)
    *_, needs_dbias, needs_dsinks = arguments
    wanted = (*inputs[:3], inputs.bias if needs_dbias else None, inputs.sinks if needs_dsinks else None)
    return tuple(dout.new_empty(0, dtype=inputs.query.dtype) if x is None else x.new_empty(x.shape) for x in wanted)


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dout, dlse, *arguments = inputs
    ctx.save_for_backward(dout, dlse, *arguments[:_NUM_INPUTS])
    ctx.numbers = tuple(arguments[_NUM_INPUTS:-4])
    handle = ctx.numbers[-1]
    ctx.block_mask = BlockMask.from_handle(handle) if isinstance(handle, int) else None
    ctx.is_asked = (True, True, True, *arguments[-2:])
    ctx.set_materialize_grads(False)


def _backward_autograd(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """out and lse are functions of the inputs, so all of the derivative goes to the inputs and none to them."""
    dout, dlse, *tensors = ctx.saved_tensors
    query = tensors[0]
    if dlse is None:
        dlse = query.new_zeros(_lse_shape(query), dtype=_lse_dtype(query))
    needs = ctx.needs_input_grad
    # A gradient that was not asked for is an empty tensor, and so is its cotangent.
    asked = [x if is_asked else None for x, is_asked in zip(cotangents, ctx.is_asked, strict=True)]
    d_dout, d_dlse, dq, dk, dv, dbias, dsinks = _call(
        "attention_double_backward", *asked, dout, dlse, *tensors, *ctx.numbers
    )
    gradients: list[Tensor | None] = [d_dout, d_dlse, dq, dk, dv, dbias, None, dsinks]
    gradients = [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=False)]
    return (*gradients, *(None,) * (len(needs) - len(gradients)))


# ---- double backward


def _double_backward(*arguments: Any) -> tuple[Tensor, ...]:
    cotangents, (dout, dlse) = arguments[:5], arguments[5:7]
    inputs, numbers = _split(arguments[7:])
    problem = numbers.problem(inputs, is_backward=True)
    gradients = dispatch.double_backward(problem, inputs, dout, dlse, cotangents)
    return tuple(_or_empty(gradient, inputs.query) for gradient in gradients)


def _double_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    dout, dlse = arguments[5:7]
    inputs, _ = _split(arguments[7:])
    wanted = (dout, dlse, *inputs[:4], inputs.sinks)
    return tuple(inputs.query.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def _refuse_third_derivative(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    raise UnsupportedError("attention has first and second derivatives; a third was asked for.")


# ---- vmap

# Tensors whose first dimension is the batch, so that a mapped dimension can join it.
_BATCH_FIRST = {"query", "key", "value", "out", "lse", "dout", "dlse", "ddq", "ddk", "ddv"}


def _vmap_rule(operator: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """Fold the mapped dimension into the batch where the result cannot differ, else run one call per index."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], Any]:
        given = dict(zip(names, arguments, strict=True))
        mapped = {name for name, dim in zip(names, in_dims, strict=True) if dim is not None}
        if mapped <= _BATCH_FIRST and _is_foldable(given):
            folded = [
                _fold(x, dim, info.batch_size) if name in _BATCH_FIRST and isinstance(x, Tensor) else x
                for name, x, dim in zip(names, arguments, in_dims, strict=True)
            ]
            results = operator(*folded)
            dims = tuple(None if result.dim() == 1 else 0 for result in results)
            shaped = tuple(
                result if dim is None else result.unflatten(0, (info.batch_size, result.shape[0] // info.batch_size))
                for result, dim in zip(results, dims, strict=True)
            )
            return shaped, dims
        per_index = [
            operator(*(x if dim is None else x.select(dim, index) for x, dim in zip(arguments, in_dims, strict=True)))
            for index in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(results) for results in zip(*per_index, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def _is_foldable(given: dict[str, Any]) -> bool:
    """A dense call without a block mask in which no batch entry has anything of its own but query, key and value."""
    bias, slopes = given["bias"], given["alibi_slopes"]
    sums_over_batch = given.get("needs_dbias") or given.get("needs_dsinks") or "ddbias" in given
    return (
        given["cu_seqlens_q"] is None
        and given["block_mask"] is None
        and given["dropout_p"] == 0
        and not (sums_over_batch and (bias is not None or given["sinks"] is not None))
        and (bias is None or bias.shape[0] == 1)
        and (slopes is None or slopes.dim() == 1)
    )


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


# ---- registration


class _Formulas(NamedTuple):
    """How autograd differentiates one operator."""

    setup_context: Callable[..., None]
    backward: Callable[..., tuple[Tensor | None, ...]]


def _define(name: str, arguments: str, num_results: int, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    results = ", ".join(["Tensor"] * num_results)
    operator = torch.library.custom_op(
        f"tilestream::{name}", kernel, mutates_args=(), schema=f"({arguments}) -> ({results})"
    )
    operator.register_fake(fake)
    names = tuple(argument.split()[-1] for argument in arguments.split(","))
    torch.library.register_vmap(operator, _vmap_rule(operator, names))
    return operator


def _differentiable(operator: Any, formulas: _Formulas) -> type[torch.autograd.Function]:
    """Register autograd, and return the same formulas as a Function for torch.func."""
    operator.register_autograd(formulas.backward, setup_context=formulas.setup_context)
    members = {
        "forward": staticmethod(lambda *arguments: operator(*arguments)),
        "setup_context": staticmethod(lambda ctx, inputs, output: formulas.setup_context(ctx, inputs, output)),
        "backward": staticmethod(formulas.backward),
        "generate_vmap_rule": True,
    }
    return type(f"{operator._name}_function", (torch.autograd.Function,), members)


_FUNCTIONS = {
    "attention": _differentiable(
        _define("attention", f"{_INPUTS}, {_NUMBERS}", 2, _attention, _attention_fake),
        _Formulas(_attention_setup, _attention_autograd),
    ),
    "attention_backward": _differentiable(
        _define(
            "attention_backward",
            f"Tensor dout, Tensor? dlse, {_INPUTS}, {_NUMBERS}, Tensor out, Tensor lse, bool needs_dbias, "
            "bool needs_dsinks",
            5,
            _backward,
            _backward_fake,
        ),
        _Formulas(_backward_setup, _backward_autograd),
    ),
    "attention_double_backward": _differentiable(
        _define(
            "attention_double_backward",
            "Tensor? ddq, Tensor? ddk, Tensor? ddv, Tensor? ddbias, Tensor? ddsinks, Tensor dout, Tensor dlse, "
            f"{_INPUTS}, {_NUMBERS}",
            7,
            _double_backward,
            _double_backward_fake,
        ),
        _Formulas(lambda ctx, inputs, output: None, _refuse_third_derivative),
    ),
}
