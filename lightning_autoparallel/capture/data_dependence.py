"""The error for a step whose Python needs a value that only a real step has."""

from __future__ import annotations

from lightning_autoparallel.capture.sources import Place, place_in_torch, place_of


def data_dependent(cause: BaseException, error: BaseException) -> str:
    """What the user's line reads or makes, and what would do instead; ``cause`` is torch's error behind ``error``."""
    place = place_of(cause) or place_of(error) or place_in_torch(cause)
    source, text = ("?", "") if place is None else (place.source, place.text)
    operator = str(getattr(cause, "func", ""))
    if "_local_scalar_dense" not in operator and "item" not in operator and "equal" not in operator:
        remedy = "use torch.where or a mask, which keep the shape"
        return (
            f"{source} makes a shape that depends on a tensor's values ({operator}: `{text}`); {_remedy(place, remedy)}"
        )
    shown = ".item()" if ".item()" in text else text
    return f"{source} reads a tensor's value ({shown}); {_remedy(place, 'use torch.where or log the tensor')}"


def _remedy(place: Place | None, own: str) -> str:
    """What helps: ``own`` where the line is the user's to change."""
    if place is not None and place.in_distributions:
        return "torch.distributions needs them there, checks apart: draw or compute that outside of the step"
    if place is None or place.library is None:
        return own
    called = "" if place.called_from is None else f", called from {place.called_from}"
    return (
        f"the line is in {place.library}{called}: switch it off in {place.library}'s settings if it is a check, "
        "or call that outside of the step"
    )
