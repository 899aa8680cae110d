"""A KV cache of many rows, each at a place of its own: what sampling for many prompts at once needs.

    prompts padded on the right -> read into a plain cache -> `fill`, each row as often as it has samples
    -> one new position of every row at a time, written at `places_B`, seeing all places up to it

A prompt that all rows have in common in length may also be read into it as into a plain one, while it is empty.

What lies past a row's place is padding or what another text left there: it is never seen, and written over when the row
comes to it. All shapes are fixed by the number of rows and by `reach`, so that a step can be captured as a CUDA graph.

Shapes: B rows, S places, L layers, H query heads, G KV heads, R query heads of a KV head, K head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from homing.lm.model.attend import KVCache
from homing.wire.run import Model

__all__ = ["RowCache"]


class RowCache(KVCache):
    def __init__(
        self, shape: Model, *, batch: int = 1, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._embedded_B1D = torch.zeros(batch, 1, shape.width, device=device, dtype=dtype)
        super().__init__(shape, batch=batch, capacity=capacity, device=device, dtype=dtype)
        self.places_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.reach = capacity  # places that are looked at: all rows are below it
        self._rows_B = torch.arange(batch, device=device)
        self._at_S = torch.arange(capacity, device=device)
        self._is_ahead_BS = torch.zeros(batch, capacity, dtype=torch.bool, device=device)

    # `swift` puts the last embedding here and looks at it one position later. One buffer, so that a captured step finds
    # it again; a copy is given out, for the buffer is written before what was read from it is used.
    @property
    def embedded_B1D(self) -> Tensor | None:
        return self._embedded_B1D.clone()

    @embedded_B1D.setter
    def embedded_B1D(self, value: Tensor | None) -> None:
        self._embedded_B1D.zero_() if value is None else self._embedded_B1D.copy_(value)

    def fill(self, read: KVCache, *, repeats: int) -> None:
        """What `read` holds, each of its rows `repeats` times, from place 0 on."""
        for mine, theirs in ((self.keys_LBGSK, read.keys_LBGSK), (self.values_LBGSK, read.values_LBGSK)):
            layers, rows, heads, places, size = theirs.shape
            per_prompt = mine.view(layers, rows, repeats, heads, self.capacity, size)
            per_prompt[:, :, :, :, :places] = theirs.unsqueeze(2)

    def look(self) -> None:
        """Before each step: what every row may see, made once for all layers."""
        self.length = 0  # the decoder counts positions of all rows alike; here each row has its own
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
        # Query heads of one KV head side by side: one product reads the keys once for all of them.
        q_BGRK = q_BHTK.reshape(B, keys_BGSK.shape[1], -1, K)
        scores_BGRS = (q_BGRK @ keys_BGSK.transpose(-1, -2)).float() / math.sqrt(K)
        scores_BGRS.masked_fill_(self._is_ahead_BS[:, None, None, : self.reach], -math.inf)
        y_BGRK = torch.softmax(scores_BGRS, dim=-1).to(values_BGSK.dtype) @ values_BGSK
        return y_BGRK.view(B, H, 1, K)
