"""Plug-in table: model families, by the architecture that ``config.json`` names."""

MODELS = {
    "LlamaForCausalLM": "pdserve.engine.model.llama:build",
    "MistralForCausalLM": "pdserve.engine.model.mistral:build",
    "Qwen2ForCausalLM": "pdserve.engine.model.qwen2:build",
    "Qwen3ForCausalLM": "pdserve.engine.model.qwen3:build",
}
