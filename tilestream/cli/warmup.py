"""``tilestream warmup``: compile the Triton kernels of chosen calls ahead, so that no later process waits for them.

What a kernel is compiled for follows from the widths, the query heads per KV head, the dtype and the features. A length
changes one thing, and of the forward alone: a few packed rows (decoding) have tiles of their own. So two forwards and
one backward are all that a variant needs. Tensors are as most callers have them: rows start at multiples of 16 bytes, a
bias has the dtype of the query and every row and key, lse has no gradient, and float32 is multiplied as torch does by
default, without TF32.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream import api, dispatch
from tilestream.bench.cases import DTYPES
from tilestream.cli import arguments as types
from tilestream.cli.console import Console
from tilestream.errors import ArgumentError
from tilestream.problem import Problem
from tilestream.spec import AttentionSpec, Band, default_scale

__all__ = ["FEATURES", "Call", "Variant", "add_parser", "plan", "run"]

# In the order in which they are written.
FEATURES = ("causal", "window", "softcap", "alibi", "bias", "sinks", "dropout", "varlen")
_FULL = "full"
_BACKEND = "triton"
# Their values do not matter, that they are given does. A limit on both sides is also what a causal window has.
_WINDOW = (32, 32)
_SOFTCAP = 30.0
_DROPOUT_P = 0.1


@dataclass(frozen=True)
class Variant:
    """What kernels are compiled for."""

    head_dim: int
    head_dim_v: int
    group: int
    dtype: str
    features: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        """Its part of a table."""
        widths = str(self.head_dim) if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        return widths, self.dtype, str(self.group), "+".join(self.features) or _FULL


_VARIANT_HEADERS = ("head_dim", "dtype", "group", "features")


class Call(NamedTuple):
    """A call that compiles some kernels of a variant: those of its forward, or of its backward."""

    variant: Variant
    name: str
    seqlen_q: int
    seqlen_k: int
    is_backward: bool = False

    def problem(self, device_type: str) -> Problem:
        """The call, for `supports`."""
        variant, features = self.variant, self.variant.features
        spec = AttentionSpec(
            band=Band.from_arguments("causal" in features, _WINDOW if "window" in features else None),
            scale=default_scale(variant.head_dim),
            softcap=_SOFTCAP if "softcap" in features else 0.0,
            dropout_p=_DROPOUT_P if "dropout" in features else 0.0,
            has_bias="bias" in features,
            has_alibi="alibi" in features,
            has_sinks="sinks" in features,
        )
        dense = Problem.dense(
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            num_heads_q=variant.group,
            num_heads_kv=1,
            head_dim=variant.head_dim,
            head_dim_v=variant.head_dim_v,
            dtype=DTYPES[variant.dtype],
            device_type=device_type,
            spec=spec,
            is_backward=self.is_backward,
        )
        return dense.packed([self.seqlen_q], [self.seqlen_k]) if "varlen" in features else dense


# Name, queries, keys.
_FORWARDS = (("prefill", 64, 64), ("decode", 1, 64))


class _Compiled(NamedTuple):
    """The kernels that one call was the first to need: names of those compiled, number of those found; its seconds."""

    compiled: list[str]
    num_cached: int
    seconds: float


def add_parser(commands: argparse._SubParsersAction[types.Parser]) -> None:
    """The command's arguments."""
    parser = commands.add_parser(
        "warmup",
        help="compile GPU kernels ahead, so that no later process waits for them",
        description="Makes small calls of every combination, and says what was compiled and where it is kept.",
    )
    parser.add_argument(
        "--head-dims", type=_widths, nargs="+", default=[(64, 64), (128, 128)], metavar="WIDTH",
        help="default 64 128; 192/128: values of another width",
    )  # fmt: skip
    dtypes = tuple(name for name in DTYPES if name != "float64")
    parser.add_argument(
        "--dtypes", choices=dtypes, nargs="+", default=["bfloat16", "float16"], metavar="DTYPE",
        help=f"some of {', '.join(dtypes)}; default bfloat16 float16",
    )  # fmt: skip
    parser.add_argument(
        "--groups", type=types.count, nargs="+", default=[1], help="query heads per KV head, as in 32/8 = 4; default 1"
    )
    parser.add_argument(
        "--features", type=_features, nargs="+", default=[("causal",), ()], metavar="FEATURES",
        help=f"{_FULL}, or some of {', '.join(FEATURES)} joined by +; default causal {_FULL}",
    )  # fmt: skip
    parser.add_argument("--no-backward", action="store_true", help="forwards alone, for inference")
    parser.add_argument("--device", type=types.device, default=torch.device("cuda"), help="default cuda")
    parser.add_argument("--list", action="store_true", help="list what would be compiled, and stop; needs no GPU")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    """Compile and print.

    Raises:
        ArgumentError: there is no such device here, or the backend does not run the calls on it.
    """
    variants = [
        Variant(head_dim, head_dim_v, group, dtype, features)
        for (head_dim, head_dim_v), group, dtype, features in itertools.product(
            args.head_dims, args.groups, args.dtypes, args.features
        )
    ]
    calls = plan(variants, not args.no_backward)
    if not args.list:
        _check_present(args.device)
    for call in calls:
        ((_, reason),) = dispatch.explain(call.problem(args.device.type), _BACKEND).reasons
        if reason is not None:
            raise ArgumentError(f"the backend {_BACKEND!r}, which warmup is for, cannot run this: {reason}.")
    if args.list:
        rows = [(*call.variant.cells(), call.name, f"{call.seqlen_q} x {call.seqlen_k}") for call in calls]
        console.table((*_VARIANT_HEADERS, "call", "queries x keys"), rows)
        return 0
    done = []
    with console.progress("warmup", len(calls)) as step:
        for call in calls:
            step(" ".join((*call.variant.cells(), call.name)))
            done.append(_compile(call, args.device))
    _show(calls, done, console)
    return 0


def plan(variants: Sequence[Variant], with_backward: bool) -> list[Call]:
    """The calls that compile every kernel of the variants, without repetitions."""
    calls = []
    for variant in dict.fromkeys(variants):
        # Packed calls have no small tiles: their lengths are on the device.
        forwards = _FORWARDS[:1] if "varlen" in variant.features else _FORWARDS
        calls += [Call(variant, *sizes) for sizes in forwards]
        if with_backward:
            calls.append(Call(variant, "backward", *_FORWARDS[0][1:], is_backward=True))
    return calls


def _widths(text: str) -> tuple[int, int]:
    """head_dim, or head_dim/head_dim_v."""
    head_dim, _, head_dim_v = text.partition("/")
    return types.count(head_dim), types.count(head_dim_v or head_dim)


def _features(text: str) -> tuple[str, ...]:
    """Features joined by +, in the order of `FEATURES`."""
    words = [] if text == _FULL else text.split("+")
    if unknown := [word for word in words if word not in FEATURES]:
        known = ", ".join(FEATURES)
        raise argparse.ArgumentTypeError(f"must be {_FULL} or some of {known} joined by +, got {unknown[0]!r}")
    return tuple(feature for feature in FEATURES if feature in words)


def _check_present(device: torch.device) -> None:
    try:
        types.available_device(str(device))
    except argparse.ArgumentTypeError as error:
        raise ArgumentError(f"warmup needs a GPU, and {error}; --list works without.") from None


def _compile(call: Call, device: torch.device) -> _Compiled:
    """Make the call; of a backward, the forward is made before the clock starts."""
    forward, leaves = _prepared(call, device)
    if call.is_backward:
        out = forward()
        forward, dout = (lambda: torch.autograd.grad(out, leaves, dout)), torch.ones_like(out)
    _wait(device)
    began = time.perf_counter()
    with _listening() as kernels:
        forward()
        _wait(device)
    seconds = time.perf_counter() - began
    compiled = [name for name, was_cached in kernels if not was_cached]
    return _Compiled(compiled, len(kernels) - len(compiled), seconds)


def _prepared(call: Call, device: torch.device) -> tuple[Callable[[], Any], list[Tensor]]:
    """The forward on random tensors, and the tensors that have gradients."""
    variant, features = call.variant, call.variant.features
    group, dtype = variant.group, DTYPES[variant.dtype]

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=call.is_backward)

    leaves = [
        leaf(1, call.seqlen_q, group, variant.head_dim),
        leaf(1, call.seqlen_k, 1, variant.head_dim),
        leaf(1, call.seqlen_k, 1, variant.head_dim_v),
    ]
    query, key, value = leaves
    options: dict[str, Any] = {"backend": _BACKEND, "causal": "causal" in features}
    if "window" in features:
        options["window"] = _WINDOW
    if "softcap" in features:
        options["softcap"] = _SOFTCAP
    if "dropout" in features:
        options["dropout_p"] = _DROPOUT_P
    if "alibi" in features:
        options["alibi_slopes"] = torch.full((group,), 0.1, device=device)
    if "bias" in features:
        leaves.append(leaf(1, group, call.seqlen_q, call.seqlen_k))
        options["bias"] = leaves[-1]
    if "sinks" in features:
        leaves.append(leaf(group))
        options["sinks"] = leaves[-1]
    if "varlen" not in features:
        return (lambda: api.attention(query, key, value, **options)), leaves
    q, k, v = (x.squeeze(0) for x in (query, key, value))
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor([0, length], dtype=torch.int32, device=device) for length in (call.seqlen_q, call.seqlen_k)
    )
    return (lambda: api.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)), leaves


@contextlib.contextmanager
def _listening() -> Iterator[list[tuple[str, bool]]]:
    """(kernel, whether it came from Triton's cache) of every one that is made ready inside."""
    import triton

    kernels: list[tuple[str, bool]] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        kernels.append((src.name.removesuffix("_kernel"), cache_hit))

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listen
        yield kernels


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _show(calls: Sequence[Call], done: Sequence[_Compiled], console: Console) -> None:
    import triton

    rows = [
        (*call.variant.cells(), call.name, ", ".join(names) or "-", str(num_cached), f"{seconds:.2f}")
        for call, (names, num_cached, seconds) in zip(calls, done, strict=True)
    ]
    console.table((*_VARIANT_HEADERS, "call", "compiled", "from cache", "seconds"), rows)
    if triton.knobs.runtime.interpret:
        console.say("\nTRITON_INTERPRET=1: the calls ran in Triton's interpreter, which compiles nothing.")
        return
    num_compiled, num_cached = sum(len(each.compiled) for each in done), sum(each.num_cached for each in done)
    seconds_in_all = sum(each.seconds for each in done)
    console.say(f"\n{num_compiled} kernels compiled, {num_cached} found in the cache, {seconds_in_all:.1f} s.")
    console.say(
        f"Triton's cache is {triton.knobs.cache.dir} (TRITON_CACHE_DIR moves it). Later processes read the kernels from"
        " there, with this version of Triton and of tilestream, on GPUs of this kind."
    )
