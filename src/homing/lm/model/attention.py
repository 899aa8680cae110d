"""Grouped-query attention and its KV caches.

    x -> q, k, v -> (Qwen3: norm q and k per head) -> RoPE -> [cache] -> softmax(q k^T / sqrt K) v -> out

    KVCache    all rows are at the same position
    RowCache   each row has its own position, for sampling many prompts at once

Shapes: B batch, T new positions, S positions seen, L layers, D width, H query heads, G KV heads, R query heads per KV
head, K head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from homing.lm.model.fused_ops import has_kernels, rotate
from homing.lm.model.layers import Linear, RMSNorm, Rope, joined
from homing.lm.model.sdpa import attend_inside, sdpa
from homing.wire.run_json import Model

__all__ = ["Attention", "KVCache", "RowCache", "attend"]


class KVCache:
    """The keys and values of all past positions: one preallocated pair of tensors per layer, filled from the left."""

    def __init__(
        self, shape: Model, *, batch: int = 1, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        size = (shape.num_layers, batch, shape.num_kv_heads, capacity, shape.head_size)
        self.keys_LBGSK = torch.zeros(size, device=device, dtype=dtype)
        self.values_LBGSK = torch.zeros(size, device=device, dtype=dtype)
        self.capacity = capacity
        self.embedded_B1D: Tensor | None = None  # embedding of the last token; `swift` uses it at the next position
        self.length = 0  # number of filled positions in every layer; the decoder updates it after the last layer

    def clear(self) -> None:
        """Empty the cache. The old keys and values stay in memory, but are never read and will be overwritten."""
        self.length, self.embedded_B1D = 0, None

    def add(self, layer: int, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new positions to a layer; return all keys and values of that layer."""
        end = self.length + k_BGTK.shape[2]
        assert end <= self.capacity, f"a KV cache of {self.capacity} positions cannot hold {end}"
        self.keys_LBGSK[layer, :, :, self.length : end] = k_BGTK
        self.values_LBGSK[layer, :, :, self.length : end] = v_BGTK
        return self.keys_LBGSK[layer, :, :, :end], self.values_LBGSK[layer, :, :, :end]

    def attend(self, layer: int, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Attend from new positions to themselves and all cached ones. Other kinds of cache override this method."""
        k_BGSK, v_BGSK = self.add(layer, k_BGTK, v_BGTK)
        T, S = q_BHTK.shape[2], k_BGSK.shape[2]
        # torch's is_causal aligns the causal mask with the top left corner, which is right only if the cache was empty.
        # A single new position may attend to all positions, so it needs no mask.
        is_first = T == S
        mask_TS = None
        if not is_first and T > 1:
            mask_TS = torch.ones(T, S, dtype=torch.bool, device=q_BHTK.device).tril(diagonal=S - T)
        with _without_cudnn():
            return sdpa(q_BHTK, k_BGSK, v_BGSK, mask=mask_TS, is_causal=is_first and T > 1, has_cudnn=False)


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Disable cuDNN attention in this context.

    cuDNN builds a new plan for each sequence length. With a KV cache the length changes with every token, and each plan
    takes tens of milliseconds.
    """
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


class Attention(nn.Module):
    def __init__(self, shape: Model, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_size = shape.head_size
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        q_width, kv_width = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        has_bias = shape.arch == "qwen2"
        self.q_proj = Linear(shape.width, q_width, has_bias=has_bias)
        self.k_proj = Linear(shape.width, kv_width, has_bias=has_bias)
        self.v_proj = Linear(shape.width, kv_width, has_bias=has_bias)
        self.o_proj = Linear(q_width, shape.width)
        if shape.arch == "qwen3":
            self.q_norm = RMSNorm(shape.head_size, shape.norm_eps)
            self.k_norm = RMSNorm(shape.head_size, shape.norm_eps)
        self.has_qk_norm = shape.arch == "qwen3"

    def forward(
        self, x_BTD: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None, mask: Any = None
    ) -> Tensor:
        if cache is None and has_kernels(x_BTD, self.head_size):
            return self._attend_by_kernels(x_BTD, cos, sin, mask)
        B, T, _ = x_BTD.shape
        heads = (B, T, -1, self.head_size)
        q, k, v = self.q_proj(x_BTD).view(heads), self.k_proj(x_BTD).view(heads), self.v_proj(x_BTD).view(heads)
        if self.has_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BHTK, k_BGTK, v_BGTK = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q_BHTK, k_BGTK = Rope.rotate(q_BHTK, cos, sin), Rope.rotate(k_BGTK, cos, sin)
        y_BHTK = attend(q_BHTK, k_BGTK, v_BGTK, self.layer, cache, mask)
        return self.o_proj(y_BHTK.transpose(1, 2).reshape(B, T, -1))

    def _attend_by_kernels(self, x_BTD: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """Compute the same as `forward`, with one fused matmul for q, k and v, and one kernel for norm and RoPE."""
        B, T, _ = x_BTD.shape
        q_BHTK, k_BGTK, v_BGTK = rotate(
            joined(x_BTD, self.q_proj, self.k_proj, self.v_proj), cos, sin,
            torch.stack([self.q_norm.weight, self.k_norm.weight]) if self.has_qk_norm else None,
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, has_norm=self.has_qk_norm,
            scale=1.0, eps=self.q_norm.eps if self.has_qk_norm else 0.0,
        )  # fmt: skip
        y_BHTK = attend(q_BHTK, k_BGTK, v_BGTK, self.layer, None, mask)
        return self.o_proj(y_BHTK.transpose(1, 2).reshape(B, T, -1))


def attend(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, layer: int, cache: KVCache | None, mask: Any = None
) -> Tensor:
    """Compute causal attention from the new positions to themselves and to the cached ones, if there is a cache.

    `mask` comes from `sdpa.isolate`, and is used only if there is no cache.
    """
    if mask is not None:
        return attend_inside(q_BHTK, k_BGTK, v_BGTK, mask)
    if cache is None:
        return sdpa(q_BHTK, k_BGTK, v_BGTK, is_causal=True)
    return cache.attend(layer, q_BHTK, k_BGTK, v_BGTK)


class RowCache(KVCache):
    """A KV cache with a separate position per row.

        prompts padded on the right -> read into a plain cache -> `fill`, repeating each row for each of its samples
        -> one new position per row and step, written at `places_B`, which attends to itself and all earlier positions

    While the cache is empty, prompts of equal length can also be read into it as into a plain cache.

    Beyond a row's current position the cache contains padding or leftovers from an earlier text. These are never
    attended to, and are overwritten when the row reaches them. All tensor shapes depend only on the number of rows and
    on `reach`, so that a step can be captured as a CUDA graph.
    """

    def __init__(
        self, shape: Model, *, batch: int = 1, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._embedded_B1D = torch.zeros(batch, 1, shape.width, device=device, dtype=dtype)
        super().__init__(shape, batch=batch, capacity=capacity, device=device, dtype=dtype)
        self.places_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.reach = capacity  # number of positions that attention reads; every row's position is below this
        self._rows_B = torch.arange(batch, device=device)
        self._at_S = torch.arange(capacity, device=device)
        self._is_ahead_BS = torch.zeros(batch, capacity, dtype=torch.bool, device=device)

    # `swift` stores the embedding of the last token here and reads it at the next position. The buffer is never
    # reallocated, because CUDA graphs use fixed addresses. The getter returns a copy, because the buffer is
    # overwritten before the caller uses the value.
    @property
    def embedded_B1D(self) -> Tensor | None:
        return self._embedded_B1D.clone()

    @embedded_B1D.setter
    def embedded_B1D(self, value: Tensor | None) -> None:
        self._embedded_B1D.zero_() if value is None else self._embedded_B1D.copy_(value)

    def fill(self, read: KVCache, *, repeats: int) -> None:
        """Copy each row of the cache `read` into this cache `repeats` times, starting at position 0."""
        for mine, source in ((self.keys_LBGSK, read.keys_LBGSK), (self.values_LBGSK, read.values_LBGSK)):
            layers, rows, heads, places, size = source.shape
            per_prompt = mine.view(layers, rows, repeats, heads, self.capacity, size)
            per_prompt[:, :, :, :, :places] = source.unsqueeze(2)

    def row(self, number: int, length: int, embedded_B1D: Tensor | None) -> KVCache:
        """Return a plain cache of one row, which shares this cache's memory and has `length` filled positions.

        `embedded_B1D` is the embedding of the last token, if there is one.
        """
        made = object.__new__(KVCache)
        made.keys_LBGSK, made.values_LBGSK = (
            each[:, number : number + 1] for each in (self.keys_LBGSK, self.values_LBGSK)
        )
        made.capacity, made.length, made.embedded_B1D = self.capacity, length, embedded_B1D
        return made

    def set_embedded(self, number: int, read: KVCache) -> None:
        """Take over the embedding of the last token that was read into a row."""
        if read.embedded_B1D is not None:
            self._embedded_B1D[number : number + 1] = read.embedded_B1D

    def copy_row(self, source: int, target: int, num_places: int) -> None:
        """Copy the first positions of a row, and the embedding of its last token, to another row."""
        for each in (self.keys_LBGSK, self.values_LBGSK):
            each[:, target, :, :num_places] = each[:, source, :, :num_places]
        self._embedded_B1D[target] = self._embedded_B1D[source]

    def take_over(self, smaller: RowCache) -> None:
        """Copy all rows of a smaller cache into the first rows of this one."""
        num_rows = len(smaller.places_B)
        self.keys_LBGSK[:, :num_rows] = smaller.keys_LBGSK
        self.values_LBGSK[:, :num_rows] = smaller.values_LBGSK
        self._embedded_B1D[:num_rows] = smaller._embedded_B1D

    def first(self, num_rows: int) -> RowCache:
        """Return a cache of the first rows, which shares this cache's memory."""
        made = copy(self)
        made.keys_LBGSK, made.values_LBGSK = (each[:, :num_rows] for each in (self.keys_LBGSK, self.values_LBGSK))
        made._embedded_B1D, made.places_B = self._embedded_B1D[:num_rows], self.places_B[:num_rows]
        made._rows_B, made._is_ahead_BS = self._rows_B[:num_rows], self._is_ahead_BS[:num_rows]
        return made

    def look(self) -> None:
        """Compute which positions each row may attend to. Call once per step: all layers use the result."""
        # Undo the decoder's update of `length`, which assumes that all rows are at the same position.
        self.length = 0
        torch.gt(self._at_S, self.places_B.unsqueeze(1), out=self._is_ahead_BS)

    def attend(self, layer: int, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        B, H, T, K = q_BHTK.shape
        if T > 1:
            assert self.length == 0, "rows at different positions advance by one position at a time"
            return super().attend(layer, q_BHTK, k_BGTK, v_BGTK)
        keys_BGSK, values_BGSK = self.keys_LBGSK[layer], self.values_LBGSK[layer]
        keys_BGSK[self._rows_B, :, self.places_B] = k_BGTK[:, :, 0]
        values_BGSK[self._rows_B, :, self.places_B] = v_BGTK[:, :, 0]
        keys_BGSK, values_BGSK = keys_BGSK[:, :, : self.reach], values_BGSK[:, :, : self.reach]
        # Group the query heads that share a KV head, so that one matmul reads its keys only once for all of them.
        q_BGRK = q_BHTK.reshape(B, keys_BGSK.shape[1], -1, K)
        scores_BGRS = (q_BGRK @ keys_BGSK.transpose(-1, -2)).float() / math.sqrt(K)
        scores_BGRS.masked_fill_(self._is_ahead_BS[:, None, None, : self.reach], -math.inf)
        y_BGRK = torch.softmax(scores_BGRS, dim=-1).to(values_BGSK.dtype) @ values_BGSK
        return y_BGRK.view(B, H, 1, K)
