"""Standard attention, replayed: each of its passes over a two-level memory, with the operand it uses again on chip.

What it loads and stores is counted by the memory, and modelled by `standard.py`; the results are real.
"""

from __future__ import annotations

import torch

from tilestream.io.memory import TwoLevelMemory
from tilestream.io.replay import DenseCall, Results, evict, spans

__all__ = ["standard_backward", "standard_forward"]

_NEGATIVE_INFINITY = float("-inf")


class _Standard:
    """The passes of one call. N x N tensors have the shape (B, H, M, N)."""

    def __init__(self, call: DenseCall, memory: TwoLevelMemory, block_m: int) -> None:
        self.call, self.memory, self.problem = call, memory, call.problem
        self.rows = spans(call.problem.seqlen_q, block_m)
        self.has_mask = not call.problem.spec.band.is_unlimited
        self.has_dropout = call.problem.spec.dropout_p > 0
        self.square = (*call.q.shape[:3], call.problem.seqlen_k)

    def allocate_square(self, name: str, element_bytes: int | None = None) -> None:
        """An N x N tensor, which is neither input nor result."""
        size = self.call.element_bytes if element_bytes is None else element_bytes
        self.memory.allocate(name, self.square, size, self.call.dtype, is_extra=True)

    def rowwise(self) -> list[tuple[int, int, slice]]:
        """(batch entry, query head, rows), all of them."""
        heads = range(self.problem.num_heads_q)
        return [(b, head, rows) for b in range(self.problem.batch) for head in heads for rows in self.rows]

    def product_with_keys(self, name: str, left: str, right: str, result: str) -> None:
        """result = left @ right^T: the whole of `right` of a KV head on chip, rows of `left` streamed."""
        call, memory = self.call, self.memory
        memory.begin(name)
        for b, head_kv, group in call.streams(packs_group=True):
            right_n = memory.load(right, (b, head_kv))
            for head in range(group.start, group.stop):
                for rows in self.rows:
                    left_m = memory.load(left, (b, head, rows))
                    made = call.reserve(memory, rows.stop - rows.start, self.problem.seqlen_k)
                    made.set(memory.product(left_m.data, right_n.data.T))
                    if result == "scores":
                        made.set(made.data * self.problem.spec.scale)
                    memory.store(result, (b, head, rows), made)
                    evict(left_m, made)
            evict(right_n)

    def product_into_rows(self, name: str, square: str, right: str, result: str, scale: float = 1.0) -> None:
        """result = square @ right: the whole of `right` of a KV head on chip, rows of the N x N tensor streamed."""
        call, memory = self.call, self.memory
        memory.begin(name)
        for b, head_kv, group in call.streams(packs_group=True):
            right_n = memory.load(right, (b, head_kv))
            for head in range(group.start, group.stop):
                for rows in self.rows:
                    square_m = memory.load(square, (b, head, rows))
                    made = call.reserve(memory, rows.stop - rows.start, right_n.data.shape[1])
                    made.set(scale * memory.product(square_m.data, right_n.data))
                    memory.store(result, (b, head, rows), made)
                    evict(square_m, made)
            evict(right_n)

    def product_into_keys(self, name: str, square: str, right: str, result: str, scale: float = 1.0) -> None:
        """result = square^T @ right: the sums of a KV head on chip, rows of both operands streamed."""
        call, memory = self.call, self.memory
        width = self.problem.head_dim if result == "dk" else self.problem.head_dim_v
        memory.begin(name)
        for b, head_kv, group in call.streams(packs_group=True):
            sums = call.reserve(memory, self.problem.seqlen_k, width)
            for head in range(group.start, group.stop):
                for rows in self.rows:
                    square_m, right_m = memory.load(square, (b, head, rows)), memory.load(right, (b, head, rows))
                    sums.set(sums.data + scale * memory.product(square_m.data.T, right_m.data))
                    evict(square_m, right_m)
            memory.store(result, (b, head_kv), sums)
            evict(sums)

    def add_mask(self) -> None:
        """masked_scores = scores + mask; the rows of the mask are used by all heads and batch entries."""
        call, memory = self.call, self.memory
        keys = slice(0, self.problem.seqlen_k)
        mask = call.hidden(slice(0, self.problem.seqlen_q), keys)
        memory.bind("mask", mask, call.element_bytes)
        memory.begin("mask")
        for rows in self.rows if self.problem.batch else []:
            mask_m = memory.load("mask", (rows,))
            for b in range(self.problem.batch):
                for head in range(self.problem.num_heads_q):
                    scores_m = memory.load("scores", (b, head, rows))
                    made = call.reserve(memory, *scores_m.data.shape)
                    made.set(scores_m.data + mask_m.data)
                    memory.store("masked_scores", (b, head, rows), made)
                    evict(scores_m, made)
            evict(mask_m)

    def softmax(self, scores: str) -> None:
        """p = softmax(scores), rows whole; a row that sees no key is 0."""
        self.memory.begin("softmax")
        for index in self.rowwise():
            scores_m = self.memory.load(scores, index)
            made = self.call.reserve(self.memory, *scores_m.data.shape)
            if self.problem.seqlen_k:
                row_max = scores_m.data.amax(1, keepdim=True)
                p_m = torch.exp(scores_m.data - row_max.masked_fill(row_max == _NEGATIVE_INFINITY, 0))
                row_sum = p_m.sum(1, keepdim=True)
                made.set(p_m / row_sum.masked_fill(row_sum == 0, 1))
            self.memory.store("p", index, made)
            evict(scores_m, made)

    def dropout(self) -> None:
        """p_dropped and keep_mask of p; the random numbers are made on chip."""
        call, memory = self.call, self.memory
        memory.begin("dropout")
        for index in self.rowwise():
            b, head, rows = index
            p_m = memory.load("p", index)
            mask_m = memory.reserve(p_m.data.shape, 1, call.dtype)
            made = call.reserve(memory, *p_m.data.shape)
            mask_m.set(call.kept(b, slice(head, head + 1), rows, slice(0, self.problem.seqlen_k)))
            made.set(p_m.data * mask_m.data * call.dropout_factor)
            memory.store("p_dropped", index, made)
            memory.store("keep_mask", index, mask_m)
            evict(p_m, mask_m, made)

    def dropout_backward(self) -> None:
        """dp of dp_dropped."""
        self.memory.begin("dropout backward")
        for index in self.rowwise():
            dp_m, mask_m = self.memory.load("dp_dropped", index), self.memory.load("keep_mask", index)
            made = self.call.reserve(self.memory, *dp_m.data.shape)
            made.set(dp_m.data * mask_m.data * self.call.dropout_factor)
            self.memory.store("dp", index, made)
            evict(dp_m, mask_m, made)

    def softmax_backward(self) -> None:
        """ds = p (dp - rowsum(p dp))."""
        self.memory.begin("softmax backward")
        for index in self.rowwise():
            p_m, dp_m = self.memory.load("p", index), self.memory.load("dp", index)
            made = self.call.reserve(self.memory, *p_m.data.shape)
            made.set(p_m.data * (dp_m.data - (p_m.data * dp_m.data).sum(1, keepdim=True)))
            self.memory.store("ds", index, made)
            evict(p_m, dp_m, made)


def standard_forward(call: DenseCall, memory: TwoLevelMemory, block_m: int) -> Results:
    """out; `memory` keeps p, and p_dropped and keep_mask where there is dropout, for the backward.

    Raises:
        FastMemoryError: an operand of a head and `block_m` rows do not fit on chip.
    """
    call.bind_inputs(memory)
    results = Results(out=call.allocate_out(memory))
    passes = _Standard(call, memory, block_m)
    passes.allocate_square("scores")
    passes.product_with_keys("scores", "q", "k", "scores")
    scores = "scores"
    if passes.has_mask:
        passes.allocate_square("masked_scores")
        passes.add_mask()
        memory.release("scores")
        scores = "masked_scores"
    passes.allocate_square("p")
    passes.softmax(scores)
    memory.release(scores)
    if passes.has_dropout:
        passes.allocate_square("p_dropped")
        passes.allocate_square("keep_mask", element_bytes=1)
        passes.dropout()
    passes.product_into_rows("out", "p_dropped" if passes.has_dropout else "p", "v", "out")
    return results


def standard_backward(call: DenseCall, memory: TwoLevelMemory, block_m: int, forward: TwoLevelMemory) -> Results:
    """dq, dk, dv, from what `forward` kept. Raises as `standard_forward`."""
    call.bind_inputs(memory)
    passes = _Standard(call, memory, block_m)
    dropped = ("p_dropped", "keep_mask") if passes.has_dropout else ()
    for name in ("p", *dropped):
        memory.adopt_extra(name, forward)
    gradients = (("dq", call.q), ("dk", call.k), ("dv", call.v))
    results = Results(**{name: call.allocate_like(memory, name, tensor) for name, tensor in gradients})
    passes.product_into_keys("dv", dropped[0] if dropped else "p", "dout", "dv")
    dp = "dp"
    if passes.has_dropout:
        memory.release("p_dropped")
        dp = "dp_dropped"
    passes.allocate_square(dp)
    passes.product_with_keys("dp", "dout", "v", dp)
    if passes.has_dropout:
        passes.allocate_square("dp")
        passes.dropout_backward()
        memory.release("dp_dropped")
        memory.release("keep_mask")
    passes.allocate_square("ds")
    passes.softmax_backward()
    memory.release("p")
    memory.release("dp")
    passes.product_into_rows("dq", "ds", "k", "dq", call.problem.spec.scale)
    passes.product_into_keys("dk", "ds", "q", "dk", call.problem.spec.scale)
    return results
