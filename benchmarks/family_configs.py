"""One small configuration for every family of models: what a Hugging Face config.json holds, sizes reduced.

Small enough to run on a processor, so that tests can hold captures against what torch does. Head counts are 8 (2 for keys
and values where a family groups them), so that tp 2 and tp 8 meet both even and too few key heads.
"""

from __future__ import annotations

from typing import Any

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCABULARY, SEQ = 64, 5, 8, 2, 128, 256, 32

_LLAMA: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": FFN,
    "vocab_size": VOCABULARY, "max_position_embeddings": SEQ, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = _LLAMA | {"num_key_value_heads": KV_HEADS}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": HEADS, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_VISION = {
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": FFN,
    "image_size": 24, "patch_size": 8,
}  # fmt: skip
_GPT2 = {
    "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": SEQ, "n_ctx": SEQ, "vocab_size": VOCABULARY,
    "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_T5 = {
    "d_model": HIDDEN, "d_kv": 8, "d_ff": FFN, "num_heads": HEADS, "num_layers": LAYERS, "vocab_size": VOCABULARY,
    "n_positions": SEQ, "dropout_rate": 0.0,
}  # fmt: skip


def _config(kind: str, architecture: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {"model_type": kind, "architectures": [architecture]}
    for part in (*parts, more):
        merged |= part
    return merged


SMALL: dict[str, dict[str, Any]] = {
    "Llama 2": _config("llama", "LlamaForCausalLM", _LLAMA),
    "Llama 3": _config("llama", "LlamaForCausalLM", _GROUPED),
    "Mistral": _config("mistral", "MistralForCausalLM", _GROUPED, sliding_window=8),
    "Mixtral": _config("mixtral", "MixtralForCausalLM", _GROUPED, num_local_experts=8, num_experts_per_tok=2),
    "Qwen2": _config("qwen2", "Qwen2ForCausalLM", _GROUPED),
    "Qwen3": _config("qwen3", "Qwen3ForCausalLM", _GROUPED, head_dim=8),
    "Qwen3-MoE": _config("qwen3_moe", "Qwen3MoeForCausalLM", _GROUPED, head_dim=8, num_experts=8, num_experts_per_tok=2,
                         moe_intermediate_size=32),
    "DeepSeek-V2": _config("deepseek_v2", "DeepseekV2ForCausalLM", _LLAMA, _LATENT, topk_method="greedy"),
    "DeepSeek-V3": _config("deepseek_v3", "DeepseekV3ForCausalLM", _LLAMA, _LATENT),
    "Gemma 2": _config("gemma2", "Gemma2ForCausalLM", _GROUPED, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "Gemma 3": _config("gemma3_text", "Gemma3ForCausalLM", _GROUPED, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "Phi-3": _config("phi3", "Phi3ForCausalLM", _GROUPED, resid_pdrop=0.0, embd_pdrop=0.0),
    "GPT-2": _config("gpt2", "GPT2LMHeadModel", _GPT2),
    "GPT-J": _config("gptj", "GPTJForCausalLM", _GPT2, rotary_dim=4, tie_word_embeddings=False),
    "GPT-NeoX": _config("gpt_neox", "GPTNeoXForCausalLM", _LLAMA, _NO_DROPOUT, hidden_dropout=0.0, attention_dropout=0.0),
    "OPT": _config("opt", "OPTForCausalLM", _LLAMA, ffn_dim=FFN, dropout=0.0, attention_dropout=0.0,
                   word_embed_proj_dim=HIDDEN),
    "BLOOM": _config("bloom", "BloomForCausalLM", n_layer=LAYERS, n_head=HEADS, hidden_size=HIDDEN, vocab_size=VOCABULARY,
                     hidden_dropout=0.0, attention_dropout=0.0),
    "Falcon": _config("falcon", "FalconForCausalLM", _LLAMA, new_decoder_architecture=True, num_kv_heads=KV_HEADS,
                      hidden_dropout=0.0, attention_dropout=0.0, bias=False, alibi=False),
    "MPT": _config("mpt", "MptForCausalLM", d_model=HIDDEN, n_layers=LAYERS, n_heads=HEADS, expansion_ratio=2,
                   max_seq_len=SEQ, vocab_size=VOCABULARY),
    "StarCoder2": _config("starcoder2", "Starcoder2ForCausalLM", _GROUPED, residual_dropout=0.0, embedding_dropout=0.0,
                          sliding_window=8),
    "GPT-BigCode": _config("gpt_bigcode", "GPTBigCodeForCausalLM", _GPT2, multi_query=True),
    "GPT-OSS": _config("gpt_oss", "GptOssForCausalLM", _GROUPED, head_dim=8, num_local_experts=8, num_experts_per_tok=2,
                       sliding_window=8),
    "T5": _config("t5", "T5ForConditionalGeneration", _T5),
    "flan-T5": _config("t5", "T5ForConditionalGeneration", _T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "BERT": _config("bert", "BertForMaskedLM", _LLAMA, _NO_DROPOUT),
    "RoBERTa": _config("roberta", "RobertaForMaskedLM", _LLAMA, _NO_DROPOUT, max_position_embeddings=SEQ + 2, pad_token_id=1),
    "ALBERT": _config("albert", "AlbertForMaskedLM", _LLAMA, _NO_DROPOUT, embedding_size=32),
    "ViT": _config("vit", "ViTForImageClassification", _VISION, _NO_DROPOUT),
    "CLIP": _config("clip", "CLIPModel", text_config=_LLAMA | {"hidden_size": HIDDEN}, vision_config=_VISION,
                    projection_dim=32),
    "Whisper": _config("whisper", "WhisperForConditionalGeneration", d_model=HIDDEN, encoder_layers=LAYERS,
                       decoder_layers=LAYERS, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
                       encoder_ffn_dim=FFN, decoder_ffn_dim=FFN, vocab_size=VOCABULARY, num_mel_bins=8,
                       max_source_positions=SEQ, max_target_positions=SEQ, dropout=0.0, pad_token_id=0, bos_token_id=1,
                       eos_token_id=2, decoder_start_token_id=1),
    "LLaVA": _config("llava", "LlavaForConditionalGeneration", image_token_index=VOCABULARY - 1,
                     vision_config=_VISION | {"model_type": "clip_vision_model"},
                     text_config=_GROUPED | {"model_type": "llama"}),
    "Mamba": _config("mamba", "MambaForCausalLM", hidden_size=HIDDEN, num_hidden_layers=LAYERS, state_size=4,
                     vocab_size=VOCABULARY),
    "Mamba 2": _config("mamba2", "Mamba2ForCausalLM", hidden_size=HIDDEN, num_hidden_layers=LAYERS, state_size=8,
                       vocab_size=VOCABULARY, num_heads=8, head_dim=16, expand=2, n_groups=1, chunk_size=8),
}  # fmt: skip
"""Family -> configuration."""
