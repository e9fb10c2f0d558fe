"""Every field that transformers 4.5 to 5.0 can write into a config.json of a supported model is known.

The fields are the attributes of the configuration classes in the wheels 4.5.1, 4.12.5, 4.18.0, 4.22.2, 4.26.1, 4.30.2, 4.34.1,
4.38.2, 4.42.4, 4.46.3, 4.49.0, 4.52.4, 4.56.2 and 5.0.0.
"""

from __future__ import annotations

import pytest

from fqvit.models.checkpoints.hints import words
from fqvit.models.checkpoints.transformers_config import FIXED, IRRELEVANT, USED

# Fields of all configurations.
COMMON = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _name_or_path
    _output_attentions add_cross_attention architectures attn_implementation bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label is_composition is_decoder is_encoder_decoder label2id length_penalty max_length min_length
    model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
    use_bfloat16 xla_device
"""
VIT = """
    attention_probs_dropout_prob encoder_stride hidden_act hidden_dropout_prob hidden_size image_size initializer_range
    intermediate_size layer_norm_eps num_attention_heads num_channels num_hidden_layers patch_size pooler_act
    pooler_output_size qkv_bias
"""
BACKBONE = "_out_features _out_indices out_features out_indices stage_names "
SWIN = """
    attention_probs_dropout_prob depths drop_path_rate embed_dim encoder_stride hidden_act hidden_dropout_prob hidden_size
    image_size initializer_range layer_norm_eps mlp_ratio num_channels num_heads num_layers patch_norm patch_size path_norm
    pretrained_window_sizes qkv_bias use_absolute_embeddings window_size
"""
OWN = {
    "vit, deit, ijepa, vit_msn": VIT,
    "vit_mae": VIT + "decoder_hidden_size decoder_intermediate_size decoder_num_attention_heads decoder_num_hidden_layers "
    "mask_ratio norm_pix_loss",
    "clip": "initializer_factor logit_scale_init_value projection_dim text_config text_config_dict vision_config "
    "vision_config_dict",
    "clip_vision_model": "attention_dropout dropout hidden_act hidden_size image_size initializer_factor initializer_range "
    "intermediate_size layer_norm_eps num_attention_heads num_channels num_hidden_layers patch_size projection_dim",
    "siglip": "initializer_factor text_config vision_config",
    "siglip_vision_model": "attention_dropout hidden_act hidden_size image_size intermediate_size layer_norm_eps "
    "num_attention_heads num_channels num_hidden_layers patch_size",
    "beit, data2vec-vision": VIT + BACKBONE + "add_fpn auxiliary_channels auxiliary_concat_input auxiliary_loss_weight "
    "auxiliary_num_convs drop_path_rate layer_scale_init_value pool_scales reshape_hidden_states segmentation_indices "
    "semantic_loss_ignore_index use_absolute_position_embeddings use_auxiliary_head use_mask_token use_mean_pooling "
    "use_relative_position_bias use_shared_relative_position_bias vocab_size",
    "swin, swinv2": SWIN + BACKBONE,
    "dinov2, dinov2_with_registers": VIT + BACKBONE + "apply_layernorm drop_path_rate layerscale_value mlp_ratio "
    "num_register_tokens reshape_hidden_states use_mask_token use_swiglu_ffn",
    "dinov3_vit": VIT + BACKBONE + "apply_layernorm attention_dropout drop_path_rate key_bias layerscale_value mlp_bias "
    "num_register_tokens pos_embed_jitter pos_embed_rescale pos_embed_shift proj_bias query_bias reshape_hidden_states "
    "rope_theta use_gated_mlp value_bias",
}  # fmt: skip


@pytest.mark.parametrize("model_type", OWN)
def test_every_field_of_old_and_new_versions_is_known(model_type: str) -> None:
    unknown = words(COMMON + OWN[model_type]) - USED - IRRELEVANT - FIXED.keys()
    assert not unknown
