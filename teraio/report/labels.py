"""Words for kinds of memory (such as weights), for lanes (directions of links) and for causes of waits."""

from __future__ import annotations

# Kinds of memory, in the order from the bottom to the top of the memory picture. Kinds whose bytes change
# least are at the bottom.
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
    "late read": "the fetch began too late to end in time, because there was no room for it earlier",
    "link busy": "the link was busy with other transfers, or an eviction had to end to free memory",
    "miss": "no plan asked for the fetch, so it began when the tensor was needed",
}


def sort_key_of_kind(kind: str) -> tuple[int, str]:
    """Return a sort key with which kinds have the order of `KINDS`. Unknown kinds sort last."""
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), kind)


def describe_lane(track: str) -> str:
    """Describe a lane (one direction of a link) in words: `fetch:ssd` -> `SSD to device`."""
    way, _, tier = track.partition(":")
    name = {"ssd": "SSD", "host": "host"}.get(tier, tier)
    match way:
        case "fetch":
            return f"{name} to device"
        case "evict":
            return f"device to {name}"
        case _:
            return track
