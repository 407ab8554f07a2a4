"""What things are called: kinds of bytes, lanes, causes of waiting."""

from __future__ import annotations

# From the bottom of the picture to its top: what stays first, what comes and goes last.
KINDS = ("reserve", "workspace", "input", "outside", "weight", "state", "grad", "activation")

KIND_WORDS = {
    "reserve": "reserve",
    "workspace": "workspace",
    "input": "inputs",
    "outside": "other tensors",
    "weight": "weights",
    "state": "optimizer states",
    "grad": "gradients",
    "activation": "activations",
}

CAUSE_WORDS = {
    "late read": "its read was issued too late to be done in time; there was no room for it earlier",
    "link busy": "the link was busy with others, or a write had to end before its room could be used",
    "miss": "no plan asked for it: it was fetched when it was needed",
}


def sort_key_of_kind(kind: str) -> tuple[int, str]:
    """For sorting; a kind that is not known comes last."""
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), kind)


def describe_lane(track: str) -> str:
    """`fetch:ssd` -> `SSD to device`."""
    way, _, tier = track.partition(":")
    name = {"ssd": "SSD", "host": "host"}.get(tier, tier)
    match way:
        case "fetch":
            return f"{name} to device"
        case "evict":
            return f"device to {name}"
        case _:
            return track
