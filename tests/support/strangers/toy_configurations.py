"""Toy-sized versions of any transformers configuration, made only from the names of its fields.

No way to shrink a configuration works for every class, so the module has several ways. (1) Set each size by
the name of its field. (2) Divide all sizes by one number, which preserves divisibility. (3) Change only the
number of layers and other limits. (4) Change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

VOCABULARY = 512
WIDTH = 128
HEADS = 4
LAYERS = 2
IMAGE = 64
POSITIONS = 128
FIRST_SPECIAL = 440  # smaller ids are words; this id and larger ones are special tokens

Rule = tuple[str, Callable[[int], int]]


def fixed(value: int) -> Callable[[int], int]:
    return lambda old: min(old, value)


def divided(factor: int, multiple: int) -> Callable[[int], int]:
    return lambda old: max(multiple, old // factor // multiple * multiple)


# Rules for all ways. The first rule whose pattern matches a field's name applies.
ALWAYS: list[Rule] = [
    (r"vocab_size|^vocab$|vocabulary_size|n_vocab|^(src|tgt)_vocab", fixed(VOCABULARY)),
    (
        r"max_.*position|^n_positions$|^n_ctx$|max_seq_len|^seq_length$|position_embedding_size",
        fixed(POSITIONS),
    ),
    (r"type_vocab", lambda old: old),
    (r"num_kv_shared_layers", fixed(0)),
    (r"num_feat_extract_layers", lambda old: old),
    (r"^(num_|n_)?(\w+_)?(layers?|blocks|depth)$|^depth$|^n_layers?$|num_hidden_layers", fixed(LAYERS)),
    (r"^first_k_dense_replace$|moe_layer_start", fixed(1)),
    (r"^image_size$|^img_size$|^input_size$", fixed(IMAGE)),
    (r"^patch_size$", fixed(8)),
    (r"^num_frames$", fixed(2)),
    (r"num_queries$|num_object_queries|num_query_tokens", fixed(8)),
]
EXPERTS: list[Rule] = [
    (r"experts_per_tok|^top_k$|moe_k$|moe_topk|router_topk|num_selected_experts", fixed(2)),
    (r"shared_experts", fixed(1)),
    (r"^n_group$|^topk_group$|^n_groups_moe$", fixed(1)),
    (r"num_(local_|routed_)?experts$|n_routed_experts|moe_num_experts|^num_moe_experts", fixed(4)),
]
NAMED: list[Rule] = [
    (r"key_value_heads|kv_heads|^n_head_kv$|num_key_value", fixed(2)),
    (r"rope_head_dim$|nope_head_dim$", fixed(16)),
    (r"head_dim$|head_size$|^d_kv$", fixed(WIDTH // HEADS)),
    (r"heads?$|^n_head$", fixed(HEADS)),
    (r"lora_rank$|^lora_dim$|low_rank", fixed(32)),
    (r"moe_intermediate|expert_intermediate|shared_expert", fixed(64)),
    (r"intermediate|ffn_|_ffn|^d_ff|inner_dim|mlp_(dim|size)|feedforward|^n_inner$|ffn$", fixed(4 * WIDTH)),
    (
        r"hidden_size|d_model|^n_embd$|embed_dim|hidden_dim|_dim$|^dim$|embedding_size|width$|channels$|size$|features$",
        fixed(WIDTH),
    ),
]


def ratio(factor: int) -> list[Rule]:
    """Return rules that divide all widths and numbers of heads by one factor, so that the width of a head
    does not change.
    """
    return [
        (r"rope_head_dim$|nope_head_dim$|head_dim$|head_size$|^d_kv$|state_size|kernel", lambda old: old),
        (r"heads?$|^n_head|heads_kv|n_groups$", divided(factor, 1)),
        (r"lora_rank$|low_rank", divided(factor, 8)),
        (
            r"intermediate|ffn|^d_ff|inner_dim|mlp_dim|feedforward|^n_inner$|hidden|d_model|^n_embd$|embed|_dim$|^dim$"
            r"|width$|out_channels$|decoder_dim",
            divided(factor, 8),
        ),
    ]


WAYS: tuple[str, ...] = ("named", "half", "quarter", "eighth", "thirtieth", "layers", "as it is")
FACTORS = {"half": 2, "quarter": 4, "eighth": 8, "thirtieth": 32}


def rules(way: str) -> list[Rule]:
    if way == "named":
        return [*ALWAYS, *EXPERTS, *NAMED]
    if way in FACTORS:
        return [*ALWAYS, *EXPERTS, *ratio(FACTORS[way])]
    return ALWAYS if way == "layers" else []


def shrunk(config: Any, way: str) -> dict[str, Any]:
    """Return the arguments with which to construct the shrunk configuration. Derived fields are left out."""
    chosen = rules(way)
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in {"id2label", "label2id", "rope_parameters", "rope_scaling"}:
            continue
        new = of_field(name, value, chosen, way)
        if new is not None and (new != value or hasattr(value, "to_dict")):
            found[name] = new
    if "seq_length" in found and "max_position_embeddings" in found:
        found["seq_length"] = found["max_position_embeddings"]
    return found


def of_field(name: str, value: Any, chosen: list[Rule], way: str) -> Any:
    """Return a field's new value, or None to keep the old value."""
    match value:
        case bool():
            return False if name == "use_cache" else None
        case int() if name.endswith(("token_id", "_token_index")):
            return value if value < VOCABULARY - 64 else special(name)
        case int():
            return sized(name, value, chosen)
        case [int(), *_] if all(type(each) is int for each in value):
            return of_list(name, value, way)
        case [str(), *_] if len(value) > LAYERS and "layer" in name and way != "as it is":
            return of_kinds(value)
    part = hasattr(value, "to_dict") and hasattr(value, "model_type")
    return type(value)(**shrunk(value, way)) if part else None


def of_kinds(values: list[str]) -> list[str]:
    """Shorten a list with the kinds of layers to LAYERS entries. Prefer the first layer of each kind."""
    places = [place for place, each in enumerate(values) if each not in values[:place]]
    places += [place for place in range(len(values)) if place not in places]
    return [values[place] for place in sorted(places[:LAYERS])]


def of_list(name: str, values: Any, way: str) -> Any:
    """Return the shrunk form of a list that has one entry per stage. Return None if the list must not change.
    The number of stages does not change.
    """
    if re.search(r"^depths$|^(num_)?layers$|blocks$|num_.*layers$", name) and way != "as it is":
        return type(values)(min(each, 1 if way == "named" else 2) for each in values)
    if re.search(r"image_size|img_size|input_size", name) and way != "as it is":
        return type(values)(min(each, IMAGE) for each in values)
    if re.search(r"ind(ex|ic)|_ids?$|stride|kernel|patch|ratio|factor|dilat|pool|pad|window|section", name):
        return None
    if re.search(r"dims?$|sizes?$|channels$|widths?$|embed", name) and way not in {"layers", "as it is"}:
        factor = max(max(values) // WIDTH, 1) if way == "named" else FACTORS[way]
        return type(values)(max(8, each // factor // 8 * 8) if each >= 8 else each for each in values)
    return None


def special(name: str) -> int:
    """Return the id of a special token. Fields of the same name get the same id in all parts of a
    configuration.
    """
    stem = re.sub(r"_token.*|_id$", "", name)
    return FIRST_SPECIAL + sum(ord(letter) * place for place, letter in enumerate(stem, 1)) % 64


def sized(name: str, value: int, chosen: list[Rule]) -> int | None:
    if value <= 1:
        return None
    for pattern, change in chosen:
        if re.search(pattern, name):
            return change(value)
    return None
