"""Read the config.json of transformers: every field is used, known to be irrelevant, or rejected.

See also: timm_config.py (config.json of timm), preprocessing.py (preprocessor_config.json).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fqvit.errors import FqvitError
from fqvit.models.checkpoints.hints import Hints, words
from fqvit.models.config import Activation, Pool

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}

# Fields that do not change the output of a vision model in eval mode.
IRRELEVANT = words(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _name_or_path _out_features
    _out_indices _output_attentions add_cross_attention add_fpn apply_layernorm architectures attention_dropout
    attention_probs_dropout_prob attn_implementation auto_map auxiliary_channels auxiliary_concat_input
    auxiliary_loss_weight auxiliary_num_convs bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_hidden_size decoder_intermediate_size decoder_num_attention_heads
    decoder_num_hidden_layers decoder_start_token_id diversity_penalty do_sample drop_path_rate dropout dtype early_stopping
    encoder_no_repeat_ngram_size encoder_stride eos_token_id exponential_decay_length_penalty feature_size finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout_prob id2label image_token_index
    initializer_bias initializer_factor initializer_range is_composition is_decoder is_encoder_decoder label2id
    layer_scale_init_value layerscale_value length_penalty logit_scale_init_value mask_ratio max_length min_length
    model_type no_repeat_ngram_size norm_pix_loss num_beam_groups num_beams num_image_tokens num_labels num_layers
    num_return_sequences out_features out_indices output_attentions output_hidden_states output_scores pad_token_id
    pool_scales pooler_act pooler_output_size pos_embed_jitter pos_embed_rescale pos_embed_shift prefix
    problem_type projection_dim remove_invalid_values repetition_penalty reshape_hidden_states return_dict
    return_dict_in_generate segmentation_indices semantic_loss_ignore_index sep_token_id stage_names suppress_tokens
    task_specific_params temperature text_config text_config_dict tf_legacy_loss tie_encoder_decoder tie_word_embeddings
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_auxiliary_head use_bfloat16
    use_cache use_mask_token vision_config vision_config_dict vocab_size xla_device
    """
)
# Fields that are accepted only with these values or null.
FIXED: dict[str, tuple[object, ...]] = {
    "pruned_heads": ({},),
    "is_hybrid": (False,),
    "backbone_config": (None,),
    "key_bias": (False,),
    "proj_bias": (True,),
    "mlp_bias": (True,),
    "use_absolute_embeddings": (False,),
    "patch_norm": (True,),
    "path_norm": (True,),
    "vision_use_head": (True,),
}
# Fields whose values are used, or can be seen from the tensors.
USED = words(
    """
    hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act layer_norm_eps image_size patch_size
    num_channels qkv_bias mlp_ratio use_swiglu_ffn num_register_tokens rope_theta query_bias value_bias use_gated_mlp
    use_absolute_position_embeddings use_relative_position_bias use_shared_relative_position_bias use_mean_pooling
    embed_dim depths num_heads window_size pretrained_window_sizes
    """
)


@dataclass(frozen=True)
class Kind:
    """A model type. classes: class name -> (pooling, prefixes of unused timm names)

    defaults: values of fields that nested configs leave out   nested: whether vision_config describes the model
    resizable, antialias: see Hints
    """

    classes: Mapping[str, tuple[Pool | None, tuple[str, ...]]]
    defaults: Mapping[str, object] = field(default_factory=dict)
    nested: bool = False
    resizable: bool = False
    antialias: bool = False


_CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "image_size": 224, "num_attention_heads": 12}
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "image_size": 224, "num_attention_heads": 12}
_CLIP_CLASSES: dict[str, tuple[Pool | None, tuple[str, ...]]] = {
    "CLIPModel": ("token", ()),
    "CLIPVisionModel": ("token", ("head.",)),
    "CLIPVisionModelWithProjection": ("token", ()),
    "CLIPForImageClassification": ("avg", ("norm.",)),
}
_SIGLIP_CLASSES: dict[str, tuple[Pool | None, tuple[str, ...]]] = {
    "SiglipModel": ("map", ()),
    "SiglipVisionModel": ("map", ()),
    "SiglipForImageClassification": ("avg", ("attn_pool.",)),
}


def _classifier(name: str, pool: Pool, *more: str) -> dict[str, tuple[Pool | None, tuple[str, ...]]]:
    """Return the entries of NameForImageClassification and NameModel, which pool in the same way. more: further suffixes"""
    return {f"{name}{end}": (pool, ()) for end in ("ForImageClassification", "Model", *more)}


KINDS: dict[str, Kind] = {
    "vit": Kind(_classifier("ViT", "token")),
    "deit": Kind(_classifier("DeiT", "token", "ForImageClassificationWithTeacher")),
    "vit_msn": Kind(_classifier("ViTMSN", "token")),
    "vit_mae": Kind(_classifier("ViTMAE", "token", "ForPreTraining")),
    "ijepa": Kind(_classifier("IJepa", "avg")),
    "swin": Kind(_classifier("Swin", "avg")),
    "swinv2": Kind(_classifier("Swinv2", "avg")),
    "clip": Kind(_CLIP_CLASSES, _CLIP, nested=True),
    "clip_vision_model": Kind(_CLIP_CLASSES, _CLIP),
    "siglip": Kind(_SIGLIP_CLASSES, _SIGLIP, nested=True),
    "siglip_vision_model": Kind(_SIGLIP_CLASSES, _SIGLIP),
    "dinov2": Kind({"Dinov2Model": ("token", ()), "Dinov2ForImageClassification": ("token_avg", ())}, resizable=True),
    "dinov2_with_registers": Kind(
        {"Dinov2WithRegistersModel": ("token", ()), "Dinov2WithRegistersForImageClassification": ("token_avg", ())},
        resizable=True,
        antialias=True,
    ),
    "dinov3_vit": Kind({"DINOv3ViTModel": ("token", ())}, resizable=True),
    "beit": Kind({"BeitModel": (None, ()), "BeitForImageClassification": (None, ())}),
    "data2vec-vision": Kind({"Data2VecVisionModel": (None, ()), "Data2VecVisionForImageClassification": (None, ())}),
}
# Well-known model types whose files cannot be loaded, and why.
WHY_NOT = {
    "siglip2": "takes images of any size as lists of patches (NaFlex)",
    "siglip2_vision_model": "takes images of any size as lists of patches (NaFlex)",
    "dinov3_convnext": "is a convolutional network",
    "convnext": "is a convolutional network",
    "resnet": "is a convolutional network",
}


def is_transformers(config: Mapping[str, Any]) -> bool:
    return "model_type" in config or "architectures" in config


def read_config(config: Mapping[str, Any], label: str, source: str = "config.json") -> Hints:
    """Return the settings of a config; raises FqvitError for fields and values that are not understood."""
    model_type = config.get("model_type")
    kind = KINDS.get(str(model_type))
    if kind is None:
        why = WHY_NOT.get(str(model_type), "has no definition in fqvit")
        raise FqvitError(
            f"{label}: model_type '{model_type}' {why}; files of {', '.join(KINDS)} can be loaded. "
            "Build the model with transformers and pass the module."
        )
    pool, unused = _class_of(config, kind, label)
    vision = config.get("vision_config") or {} if kind.nested else config
    if not isinstance(vision, Mapping):
        raise FqvitError(
            f"{label}: {source}: vision_config is a {type(vision).__name__}, expected an object. The file is damaged."
        )
    _check_fields(config, label, source)
    if kind.nested:
        _check_fields(vision, label, f"{source}: vision_config")
    fields = {**kind.defaults, **{name: value for name, value in vision.items() if value is not None}}
    if model_type in ("beit", "data2vec-vision"):
        pool = "avg" if fields.get("use_mean_pooling", True) else "token"
    act = fields.get("hidden_act")
    if fields.get("use_gated_mlp"):
        if act != "silu":
            raise FqvitError(
                f"{label}: {source}: a gated MLP with hidden_act '{act}', expected 'silu'. Pass the module itself."
            )
        act = None  # the tensors show that the MLP is gated
    if act is not None and act not in ACTIVATIONS:
        raise FqvitError(f"{label}: {source}: hidden_act '{act}', expected one of {', '.join(ACTIVATIONS)}.")
    heads = fields.get("num_heads", fields.get("num_attention_heads"))
    image = pair(fields.get("image_size"), "image_size", label, source)
    windows = fields.get("window_size")
    sizes = {
        ours: _integer(fields[theirs], theirs, label, source)
        for ours, theirs in (
            ("width", "embed_dim" if "embed_dim" in fields else "hidden_size"),
            ("depth", "num_hidden_layers"),
            ("hidden", "intermediate_size"),
            ("channels", "num_channels"),
            ("registers", "num_register_tokens"),
        )
        if theirs in fields
    }
    if isinstance(fields.get("patch_size"), int):
        sizes["patch"] = fields["patch_size"]
    if model_type in ("dinov2", "dinov2_with_registers"):
        sizes.pop("hidden", None)  # DINOv2 uses mlp_ratio
    return Hints(
        heads=_integers(heads, "num_attention_heads", label, source),
        eps=_number(fields.get("layer_norm_eps"), "layer_norm_eps", label, source),
        image=image,
        labels=labels_of(config, label),
        pool=pool,
        activation=None if act is None else ACTIVATIONS[act],
        qkv_bias=fields.get("qkv_bias") if isinstance(fields.get("qkv_bias"), bool) else None,
        theta=_number(fields.get("rope_theta"), "rope_theta", label, source),
        windows=_integers(windows, "window_size", label, source),
        pretrained_windows=_integers(fields.get("pretrained_window_sizes"), "pretrained_window_sizes", label, source),
        sizes=sizes,
        unused=unused,
        antialias=kind.antialias,
        resizable=kind.resizable,
        model_type=str(model_type),
        source=source,
    )


def _class_of(config: Mapping[str, Any], kind: Kind, label: str) -> tuple[Pool | None, tuple[str, ...]]:
    """Return the pooling and the unused names of the config's model class, or of the first class if the config names none."""
    names = config.get("architectures")
    if not names:
        return next(iter(kind.classes.values()))
    name = names[0] if isinstance(names, (list, tuple)) else str(names)
    if name not in kind.classes:
        problem = f"{label}: weights of {name}, expected {', '.join(kind.classes)}"
        raise FqvitError(f"{problem}. Build the model with transformers and pass the module.")
    return kind.classes[name]


def _check_fields(config: Mapping[str, Any], label: str, source: str) -> None:
    for name, value in config.items():
        if name in FIXED:
            if value is not None and value not in FIXED[name]:
                raise FqvitError(f"{label}: {source}: {name} {value!r}, expected {FIXED[name][0]!r}. Pass the module itself.")
        elif name not in USED and name not in IRRELEVANT and value is not None:
            problem = f"{label}: {source}: {name} {str(value)[:40]!r} is not understood"
            raise FqvitError(f"{problem}. Build the model with transformers and pass the module.")


def labels_of(config: Mapping[str, Any], label: str) -> tuple[str, ...] | None:
    """Return the class names of id2label, whose keys must be 0, 1, 2, ..."""
    found = config.get("id2label")
    if not found:
        return None
    try:
        names = {int(key): str(value) for key, value in found.items()}
    except (AttributeError, ValueError):
        names = {}
    if sorted(names) != list(range(len(found))):
        raise FqvitError(f"{label}: the keys of id2label are not 0, 1, 2, ... The config.json is damaged.")
    return tuple(names[i] for i in range(len(names)))


def pair(value: object, name: str, label: str, source: str) -> tuple[int, int] | None:
    """Return a size, given as one or two numbers, as (height, width); None if it is None."""
    numbers = _integers(value, name, label, source)
    if numbers is None:
        return None
    if len(numbers) not in (1, 2) or not all(1 <= side <= 8192 for side in numbers):
        raise FqvitError(f"{label}: {source}: {name} {value!r}, expected one or two numbers, 1 to 8192. The file is damaged.")
    return numbers[0], numbers[-1]


def _integer(value: object, name: str, label: str, source: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise FqvitError(f"{label}: {source}: {name} {str(value)[:40]!r}, expected an integer. The file is damaged.")
    return value


def _integers(value: object, name: str, label: str, source: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(_integer(item, name, label, source) for item in (value if isinstance(value, (list, tuple)) else (value,)))


def _number(value: object, name: str, label: str, source: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise FqvitError(f"{label}: {source}: {name} {str(value)[:40]!r}, expected a number. The file is damaged.") from None
    if not math.isfinite(number):
        raise FqvitError(f"{label}: {source}: {number} in {name}, expected finite numbers. The file is damaged.")
    return number
