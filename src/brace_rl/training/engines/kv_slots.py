"""The key-value cache of the embedded engine: right-aligned columns over a fixed number of row slots.

Every row in use ends at the same column, the *cursor*; a row with ``n`` cached tokens fills columns
``cursor - n .. cursor - 1`` of its slot and whatever lies left of them is masked. Appending one token to every row is
one new column. Adding several tokens to some rows is the same operation on a sub-batch: the rows' columns are laid out
so that they still end at the cursor.

::

    slot 0   . . . a a a a a|      cursor ->|
    slot 1   . b b b b b b b|      decode: one column more for all
    slot 2   . . . . . . c c|      extend: row written to end at the cursor

The model sees an ordinary :class:`transformers.Cache` and builds its own masks, full or sliding, from the 2D attention
mask: columns of a row are contiguous, so a distance in columns is a distance in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from brace_rl.errors import ModelError

_MIN_HEADROOM = 64
"""Fewest free columns kept right of the rows; an appended column costs no copy until they are used up."""
_HEADROOM_SHARE = 4
"""Free columns are at least this fraction (1/4) of the widest row, so re-aligning costs about four columns per step."""
_COLUMN_MULTIPLE = 16
"""Buffers are this many columns or a multiple, so that every head of every slot starts equally aligned."""
_SHRINK_FACTOR = 4
"""Buffers more than this many times larger than needed are given back."""

RowStates = list[tuple[Tensor, Tensor]]
"""Keys and values ``[heads, tokens, width]`` of one row, per layer: a row taken out of its slot."""


class _Window:
    """Which part of the buffers the next forward reads and writes; shared by all layers."""

    def __init__(self) -> None:
        self.first_row = 0
        self.last_row = 1
        self.end = 1
        self.width = 1
        self.is_new: Tensor | None = None


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One attention layer's buffers ``[slots, heads, capacity, width]``, seen through the current window."""

    def __init__(self, window: _Window, sliding_window: int | None) -> None:
        super().__init__()
        self.window = window
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.shapes: tuple[torch.Size, torch.Size] | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember what a token's states look like; buffers come with :meth:`allocate`."""
        self.shapes = (key_states.shape, value_states.shape)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def allocate(self, slots: int, capacity: int) -> tuple[Tensor, Tensor]:
        """New zeroed buffers. Masked columns are read (times zero), so they must be finite."""
        if self.shapes is None:
            raise RuntimeError("the layer's shapes are not known before the first forward")
        keys, values = (
            torch.zeros(slots, shape[1], capacity, shape[3], dtype=self.dtype, device=self.device)
            for shape in self.shapes
        )
        return keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens into the window's last columns and return all of its columns."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        window, new = self.window, key_states.shape[-2]
        rows = slice(window.first_row, window.last_row)
        tail = slice(window.end - new, window.end)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            target = buffer[rows, :, tail]
            # Left-pad queries come out of attention over nothing: what they computed must never enter the cache.
            target.copy_(states if window.is_new is None else torch.where(window.is_new, states, target))
        seen = slice(window.end - self._visible(new), window.end)
        return self.keys[rows, :, seen], self.values[rows, :, seen]

    def _visible(self, new: int) -> int:
        width = self.window.width
        return width if self.sliding_window is None else min(width, self.sliding_window - 1 + new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        visible = self._visible(query_length)
        return visible, self.window.width - visible

    def get_seq_length(self) -> int:
        """Columns of the window before its new tokens, which is the index of the first query."""
        return self.window.width - self.window_queries

    @property
    def window_queries(self) -> int:
        is_new = self.window.is_new
        return 1 if is_new is None else is_new.shape[-2]

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class KVSlots(Cache):  # type: ignore[misc]
    """Right-aligned key-value columns for ``slots`` rows; rows in use are always slots ``0 .. n - 1``.

    Raises:
        ModelError: some layer of the model is neither full nor sliding-window attention.
    """

    def __init__(self, config: Any, slots: int) -> None:
        self.slots = slots
        self.capacity = 0
        self.cursor = 0
        self._window = _Window()
        super().__init__(layers=[self._slot_layer(layer) for layer in _ordinary_layers(config)])
        self.stores: list[_SlotLayer] = [layer for layer in self.layers if isinstance(layer, _SlotLayer)]

    def _slot_layer(self, layer: Any) -> Any:
        if not isinstance(layer, DynamicLayer):
            return layer
        return _SlotLayer(self._window, getattr(layer, "sliding_window", None))

    def append_column(self, *, rows: int, width: int) -> None:
        """Point the next forward at rows ``0 .. rows - 1`` with one new token each; ``width`` columns, it included."""
        self.cursor += 1
        self._point(0, rows, width, None)

    def extend(self, *, first_row: int, width: int, is_new: Tensor) -> None:
        """Point the next forward at the rows from ``first_row`` on; their new tokens end at the cursor.

        Args:
            is_new: ``[rows, queries]``, False at left padding, where the cache keeps what it holds.
            width: columns of the longest of these rows, new tokens included.
        """
        self._point(first_row, first_row + is_new.shape[0], width, is_new[:, None, :, None])

    def _point(self, first_row: int, last_row: int, width: int, is_new: Tensor | None) -> None:
        window = self._window
        window.first_row, window.last_row, window.end = first_row, last_row, self.cursor
        window.width, window.is_new = width, is_new

    def make_room(self, *, rows: int, live_width: int, width: int) -> None:
        """Make sure ``width`` columns lie left of the cursor and a free one right of it.

        The last ``live_width`` columns of the first ``rows`` slots are kept, everything else may be lost.
        """
        if rows and width <= self.cursor < self.capacity:
            return
        wanted = width + max(_MIN_HEADROOM, width // _HEADROOM_SHARE)
        wanted += -wanted % _COLUMN_MULTIPLE
        resize = self.capacity <= width or self.capacity > _SHRINK_FACTOR * wanted
        # Matrix kernels may round differently at other strides and alignments. Starting an empty engine from the same
        # layout every time makes its results independent of what it served before, to the last bit.
        resize = resize or (not rows and self.capacity != wanted)
        old = (slice(0, rows), slice(None), slice(self.cursor - live_width, self.cursor))
        new = (slice(0, rows), slice(None), slice(width - live_width, width))
        for layer in self.stores:
            keys, values = layer.keys, layer.values
            if resize:
                layer.keys, layer.values = layer.allocate(self.slots, wanted)
            if rows and live_width:
                layer.keys[new] = keys[old] if resize else keys[old].clone()
                layer.values[new] = values[old] if resize else values[old].clone()
        self.capacity = wanted if resize else self.capacity
        self.cursor = width

    def take(self, row: int, length: int) -> RowStates:
        """Copy out the last ``length`` columns of a slot."""
        columns = slice(self.cursor - length, self.cursor)
        return [(layer.keys[row, :, columns].clone(), layer.values[row, :, columns].clone()) for layer in self.stores]

    def put(self, row: int, states: RowStates, *, before: int) -> None:
        """Write states taken earlier into a slot so that ``before`` columns are left between them and the cursor."""
        end = self.cursor - before
        for layer, (keys, values) in zip(self.stores, states, strict=True):
            layer.keys[row, :, end - keys.shape[-2] : end] = keys
            layer.values[row, :, end - values.shape[-2] : end] = values

    def move(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copy whole slots (their last ``width`` columns) onto others; no slot is both source and target."""
        columns = slice(self.cursor - width, self.cursor)
        for layer in self.stores:
            for buffer in (layer.keys, layer.values):
                buffer[targets, :, columns] = buffer[sources, :, columns]

    def clear(self) -> None:
        """Forget everything; zeroed, so that nothing a diverged model left behind is ever multiplied."""
        self.cursor = 0
        for layer in self.stores:
            layer.keys.zero_()
            layer.values.zero_()


def _ordinary_layers(config: Any) -> list[Any]:
    """The cache layers transformers would make for the model, refused unless all are ordinary attention."""
    text_config = config.get_text_config(decoder=True)
    try:
        layers = list(DynamicCache(config=config).layers)
    except (KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{config.model_type}: transformers builds no key-value cache for it ({error})") from None
    kinds = set(getattr(text_config, "layer_types", None) or ())
    chunked = "chunked_attention" in kinds or getattr(text_config, "attention_chunk_size", None) is not None
    odd = sorted(
        {type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
        - {"DummyLayer"}  # holds nothing: layers without attention, or that read another layer's cache
    )
    if odd or chunked or not layers:
        what = ", ".join(odd) or ("chunked attention" if chunked else "no cache at all")
        raise ModelError(
            f"{config.model_type}: the embedded engine needs full or sliding-window attention in every layer, "
            f"this model has {what}; use another model or another engine"
        )
    return layers
