"""Validation at the public border of ``core``. Every estimator goes through here once; nothing else checks anything.

One check waits until the rows are laid out, which answers it at once for most of them: :func:`check_earned`.

Shapes, dtypes and options are known without looking at the data and are always checked. What must look at the data
(not-a-number, rewards nobody earned) makes a GPU wait for the host, so ``check_inputs=False`` turns exactly that off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from brace_rl.core.layout import Tokens, indicator, only_where, place_tokens, row_chunks, segment_runs

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked_tokens(
    *,
    values: Tensor,
    rewards: Tensor,
    policy_mask: Tensor,
    behavior_logprobs: Tensor | None,
    target_logprobs: Tensor | None,
    bootstrap_values: Tensor | None,
    segment_ids: Tensor | None,
    check_inputs: bool,
    has_ratios: bool = True,
) -> Tokens:
    """The input of an estimator, detached and found to make sense; one without ratios has no log-probs.

    Raises:
        ValueError: a shape, dtype or value that cannot be meant; names the argument and, for a value, its place.
    """
    floats = tensors_of({"values": values, "rewards": rewards})
    if has_ratios:
        floats |= tensors_of({"behavior_logprobs": behavior_logprobs, "target_logprobs": target_logprobs})
    dtype = check_shapes(policy_mask, floats)
    if segment_ids is not None:
        check_segment_ids(segment_ids, policy_mask)
    if bootstrap_values is not None:
        _check_bootstrap_shape(bootstrap_values, policy_mask, packed=segment_ids is not None)
    finite = False
    if check_inputs:
        earned = {name: x for name, x in floats.items() if name != "rewards"}
        finite = check_finite(policy_mask, earned)
        _check_finite_rewards(rewards)
        if bootstrap_values is not None:
            _check_bootstrap(bootstrap_values, policy_mask, segment_ids)
    return Tokens(
        values=values.detach(),
        rewards=rewards.detach(),
        behavior_logprobs=None if behavior_logprobs is None else behavior_logprobs.detach(),
        target_logprobs=None if target_logprobs is None else target_logprobs.detach(),
        policy_mask=policy_mask,
        bootstrap_values=None if bootstrap_values is None else bootstrap_values.detach(),
        segment_ids=segment_ids,
        dtype=dtype,
        finite=finite,
        rewards_unchecked=check_inputs,
    )


def check_options(
    *,
    rho_clip: float | None = None,
    c_clip: float | None = None,
    gamma: float | None = None,
    lam: float | None = None,
) -> None:
    """Ranges of the scalar options; None means the estimator has no such option."""
    for name, clip in (("rho_clip", rho_clip), ("c_clip", c_clip)):
        if clip is not None and not clip > 0:
            raise ValueError(f"{name} = {clip}: must be above 0 (math.inf for no cap)")
    if gamma is not None and not 0 < gamma <= 1:
        raise ValueError(f"gamma = {gamma}: must be above 0 and at most 1")
    if lam is not None and not 0 <= lam <= 1:
        raise ValueError(f"lam = {lam}: must be between 0 and 1")


def check_window(window: int | Tensor, policy_mask: Tensor, *, check_inputs: bool) -> int | Tensor:
    """A window as an int, or as ``[B, T]`` integers when every position has its own."""
    if not isinstance(window, Tensor):
        if isinstance(window, bool) or not isinstance(window, int):
            raise ValueError(
                f"window = {window!r}: must be an int (policy tokens) or an integer tensor, such as what "
                "drift_window or path_windows choose from the data"
            )
        if window < 0:
            raise ValueError(f"window = {window}: must be at least 0")
        return window
    if window.dtype not in (torch.int64, torch.int32) or (window.dim() != 0 and window.shape != policy_mask.shape):
        raise ValueError(
            f"window: got {_shape(window)} {window.dtype}, must be an integer tensor, a scalar or one entry per token "
            f"{_shape(policy_mask)}"
        )
    if check_inputs:
        place = _first(policy_mask & (window < 0))
        if place is not None:
            raise ValueError(f"window: negative at {_where(place)}; must be at least 0")
    if window.dim() == 0 and window.device.type == "cpu":
        return max(0, int(window))
    return window.detach().expand(policy_mask.shape)


def tensors_of(named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The same, all of them tensors: a list or a numpy array is none, however much it looks like one."""
    tensors = {}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: got {type(x).__name__}, must be a torch tensor; use torch.as_tensor")
        tensors[name] = x
    return tensors


def check_shapes(policy_mask: Tensor, floats: Mapping[str, Tensor], *, mask_name: str = "policy_mask") -> torch.dtype:
    """Check that everything is ``[B, T]``; return the dtype to compute in: float64 if any input is, else float32.

    Args:
        mask_name: what the caller's caller knows the mask by.
    """
    tensors_of({mask_name: policy_mask})
    if policy_mask.dtype != torch.bool:
        raise ValueError(f"{mask_name}: got {policy_mask.dtype}, must be bool; use {mask_name}.bool()")
    if policy_mask.dim() != 2:
        raise ValueError(f"{mask_name}: got {_shape(policy_mask)}, must be [batch, tokens]")
    for name, x in floats.items():
        if x.shape != policy_mask.shape:
            raise ValueError(f"{name}: got {_shape(x)}, must be {_shape(policy_mask)} like {mask_name}")
        if x.dtype not in _FLOATS:
            raise ValueError(f"{name}: got {x.dtype}, must be a floating-point tensor; use {name}.float()")
        if x.device != policy_mask.device:
            raise ValueError(f"{name}: is on {x.device}, {mask_name} is on {policy_mask.device}; move one of them")
    return torch.float64 if any(x.dtype == torch.float64 for x in floats.values()) else torch.float32


def check_segment_ids(segment_ids: Tensor, policy_mask: Tensor) -> None:
    """``[B, T]`` integers."""
    tensors_of({"segment_ids": segment_ids})
    if segment_ids.shape != policy_mask.shape or segment_ids.is_floating_point() or segment_ids.is_complex():
        raise ValueError(
            f"segment_ids: got {_shape(segment_ids)} {segment_ids.dtype}, must be {_shape(policy_mask)} integers"
        )


def check_finite(policy_mask: Tensor, tensors: Mapping[str, Tensor]) -> bool:
    """No NaN and no infinity at a policy token; returns whether there is none anywhere."""
    # Nearly always everything is finite, and then so is one sum: a single cheap pass and one look.
    if not tensors or math.isfinite(float(sum(x.detach().sum() for x in tensors.values()))):
        return True
    for name, x in tensors.items():
        place = _first(policy_mask & ~torch.isfinite(x))
        if place is not None:
            raise ValueError(
                f"{name}: {float(x[place])} at {_where(place)}, a policy token; mend what computed it, or take the "
                "token out of policy_mask if the policy did not sample it"
            )
    return False


def check_rows(name: str, x: Tensor, policy_mask: Tensor, *, check_inputs: bool) -> None:
    """``[B]``, one figure per row, finite where the row has policy tokens."""
    if x.shape != policy_mask.shape[:1] or x.dtype not in _FLOATS or x.device != policy_mask.device:
        raise ValueError(
            f"{name}: got {_shape(x)} {x.dtype} on {x.device}, must be [{policy_mask.shape[0]}] floating point on "
            f"{policy_mask.device}"
        )
    place = _first(policy_mask.any(1) & ~torch.isfinite(x)) if check_inputs else None
    if place is not None:
        raise ValueError(f"{name}: {float(x[place])} at {_where(place)}; must be finite")


def check_earned(rewards: Tensor, policy_mask: Tensor, segment_ids: Tensor | None, *, first_row: int) -> None:
    """No reward before the first policy token of its response; all ``[R, T]``, rows ``first_row`` on of the batch.

    Where no policy token has to be moved, no reward lies outside them either, and nothing is left to be checked.
    """
    if only_where(indicator(policy_mask, torch.promote_types(rewards.dtype, torch.float32)), rewards):
        return
    begun = policy_mask.cumsum(1)
    ever = begun[:, -1:]
    if segment_ids is not None:
        runs = segment_runs(segment_ids)
        counts = torch.zeros_like(runs).scatter_add_(1, runs, policy_mask.long())
        before = (counts.cumsum(1) - counts).gather(1, runs)
        begun, ever = begun - before, counts.gather(1, runs)
    place = _first(rewards.ne(0) & (begun == 0) & (ever > 0))
    if place is not None:
        raise ValueError(
            f"rewards: {float(rewards[place])} at {_where((place[0] + first_row, place[1]))} comes before the first "
            "policy token of its response, so no action earned it; put it on the policy token it belongs to"
        )


def _check_finite_rewards(rewards: Tensor) -> None:
    if math.isfinite(float(rewards.detach().sum())):
        return
    place = _first(~torch.isfinite(rewards))
    if place is not None:
        raise ValueError(
            f"rewards: {float(rewards[place])} at {_where(place)}; rewards are read everywhere, because one on a tool "
            "token belongs to the policy token before it; use 0 where there is none"
        )


def _check_bootstrap_shape(bootstrap_values: Tensor, policy_mask: Tensor, *, packed: bool) -> None:
    tensors_of({"bootstrap_values": bootstrap_values})
    wanted = policy_mask.shape if packed else policy_mask.shape[:1]
    if bootstrap_values.shape != wanted:
        raise ValueError(
            f"bootstrap_values: got {_shape(bootstrap_values)}, must be {list(wanted)}"
            + (" with segment_ids (read at the last policy token of each response)" if packed else ", one per row")
        )
    if bootstrap_values.dtype not in _FLOATS or bootstrap_values.device != policy_mask.device:
        raise ValueError(
            f"bootstrap_values: got {bootstrap_values.dtype} on {bootstrap_values.device}, must be floating point on "
            f"{policy_mask.device}"
        )


def _check_bootstrap(bootstrap_values: Tensor, policy_mask: Tensor, segment_ids: Tensor | None) -> None:
    for rows in row_chunks(policy_mask):
        mask, bootstrap = policy_mask[rows], bootstrap_values[rows]
        if segment_ids is None:
            is_read = mask.any(1)
        else:
            placement = place_tokens(mask, segment_ids=segment_ids[rows], dtype=torch.float32)
            is_read = placement.put(placement.is_policy - placement.continues) > 0
        place = _first(is_read & ~torch.isfinite(bootstrap))
        if place is not None:
            at = (place[0] + rows.start, *place[1:])
            raise ValueError(
                f"bootstrap_values: {float(bootstrap_values[at])} at {_where(at)}; use 0 for a response that ended"
            )


def _first(wrong: Tensor) -> tuple[int, ...] | None:
    places = wrong.nonzero()
    return tuple(places[0].tolist()) if len(places) else None


def _where(place: tuple[int, ...]) -> str:
    return ", ".join(f"{name} {i}" for name, i in zip(("row", "position"), place, strict=False)) or "its only entry"


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
