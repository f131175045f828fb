"""The model types that are tested, those of every kind of layer first."""

from hf_hyperconn.families.family import LISTED_FAMILIES

TESTED = (
    *LISTED_FAMILIES,
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bitnet", "chinese_clip_vision_model"),
    *("clip_text_model", "clip_vision_model", "codegen", "cosmos3_edge_text", "ctrl", "cwm", "deepseek_v2"),
    *("deepseek_v32", "deit", "diffllama", "dinov2", "dinov2_with_registers", "dinov3_vit", "dots1"),
    *("dots3_note_text", "ernie4_5", "ernie4_5_moe", "eurobert", "exaone4", "exaone_moe", "falcon_mamba"),
    *("flex_olmo", "flint", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text"),
    *("glm4v_text", "glm_image_text", "glm_moe_dsa", "glm_ocr_text", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"),
    *("gptj", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "ijepa", "inkling_text", "internlm3"),
    *("internvl_vision", "iquestcoder", "jais2", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2"),
    *("lfm2_moe", "lfm3", "llama4_text", "mamba", "mamba2", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2"),
    *("minimax_m3_vl_text", "ministral", "ministral3", "mistral4", "mistral_large4_text", "mlcd_vision_model"),
    *("modernbert", "modernbert-decoder", "nanochat", "nemotron", "openai_privacy_filter", "persimmon", "phi"),
    *("phimoe", "pixio", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("radio", "recurrent_gemma", "siglip_vision_model", "solar_open", "stablelm", "ultrabert", "vaultgemma"),
    *("vit", "vit_mae", "vit_msn", "youtu"),
    *("aria", "gemma3", "glm4v", "idefics3", "internvl", "llava", "llava_next", "llava_onevision"),
    *("mistral3", "paligemma", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "smolvlm", "voxtral"),
    *("aya_vision", "bamba", "beit", "biogpt", "bloom", "clip", "cohere", "esm", "falcon_h1", "gemma4_text"),
    *("glm4v_vision", "jamba", "mbart", "moonshine", "mpt", "opt", "roberta-prelayernorm", "switch_transformers"),
    *("t5", "umt5", "videomae", "whisper"),
)
