"""Triton kernels: every feature of the contract on every GPU that Triton reaches."""

from __future__ import annotations

from tilestream.backends.triton.backend import BACKEND, TritonBackend

__all__ = ["BACKEND", "TritonBackend"]
