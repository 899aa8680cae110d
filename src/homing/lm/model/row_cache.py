"""A KV cache with a separate position per row, for sampling many prompts at once.

    prompts padded on the right -> read into a plain cache -> `fill`, repeating each row for each of its samples
    -> one new position of every row at a time, written at `places_B`, seeing all positions up to it

While it is empty, prompts of equal length can also be read into it as into a plain cache.

What is stored past a row's position is padding or left over from another text: it is never seen, and overwritten when
the row gets there. All shapes are fixed by the number of rows and by `reach`, so that a step can be captured as a CUDA
graph.

Shapes: B rows, S positions, L layers, H query heads, G KV heads, R query heads per KV head, K head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from homing.lm.model.attention import KVCache
from homing.wire.run_json import Model

__all__ = ["RowCache"]


class RowCache(KVCache):
    def __init__(
        self, shape: Model, *, batch: int = 1, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._embedded_B1D = torch.zeros(batch, 1, shape.width, device=device, dtype=dtype)
        super().__init__(shape, batch=batch, capacity=capacity, device=device, dtype=dtype)
        self.places_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.reach = capacity  # positions that attention reads; every row is below it
        self._rows_B = torch.arange(batch, device=device)
        self._at_S = torch.arange(capacity, device=device)
        self._is_ahead_BS = torch.zeros(batch, capacity, dtype=torch.bool, device=device)

    # `swift` stores the last embedding here and reads it at the next position. It is one buffer, so that a captured
    # step finds it again; readers get a copy, because the buffer is overwritten before they use the value.
    @property
    def embedded_B1D(self) -> Tensor | None:
        return self._embedded_B1D.clone()

    @embedded_B1D.setter
    def embedded_B1D(self, value: Tensor | None) -> None:
        self._embedded_B1D.zero_() if value is None else self._embedded_B1D.copy_(value)

    def fill(self, read: KVCache, *, repeats: int) -> None:
        """Copy the contents of `read`, each of its rows `repeats` times, starting at position 0."""
        for mine, source in ((self.keys_LBGSK, read.keys_LBGSK), (self.values_LBGSK, read.values_LBGSK)):
            layers, rows, heads, places, size = source.shape
            per_prompt = mine.view(layers, rows, repeats, heads, self.capacity, size)
            per_prompt[:, :, :, :, :places] = source.unsqueeze(2)

    def look(self) -> None:
        """Compute once per step, for all layers, which positions each row may see."""
        self.length = 0  # the decoder counts one position for all rows; here each row has its own
        torch.gt(self._at_S, self.places_B.unsqueeze(1), out=self._is_ahead_BS)

    def attend(self, layer: int, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        B, H, T, K = q_BHTK.shape
        if T > 1:
            assert self.length == 0, "rows at different places go on by one position at a time"
            return super().attend(layer, q_BHTK, k_BGTK, v_BGTK)
        keys_BGSK, values_BGSK = self.keys_LBGSK[layer], self.values_LBGSK[layer]
        keys_BGSK[self._rows_B, :, self.places_B] = k_BGTK[:, :, 0]
        values_BGSK[self._rows_B, :, self.places_B] = v_BGTK[:, :, 0]
        keys_BGSK, values_BGSK = keys_BGSK[:, :, : self.reach], values_BGSK[:, :, : self.reach]
        # Group the query heads of each KV head: one matmul reads the keys once for all of them.
        q_BGRK = q_BHTK.reshape(B, keys_BGSK.shape[1], -1, K)
        scores_BGRS = (q_BGRK @ keys_BGSK.transpose(-1, -2)).float() / math.sqrt(K)
        scores_BGRS.masked_fill_(self._is_ahead_BS[:, None, None, : self.reach], -math.inf)
        y_BGRK = torch.softmax(scores_BGRS, dim=-1).to(values_BGSK.dtype) @ values_BGSK
        return y_BGRK.view(B, H, 1, K)
