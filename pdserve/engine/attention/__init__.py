"""Plug-in table: attention over the paged KV cache, by name."""

ATTENTION_BACKENDS = {
    "sdpa": "pdserve.engine.attention.sdpa:SdpaAttention",
    "cpu_paged": "pdserve.engine.attention.cpu_paged:CpuPagedAttention",
    "flash_attn": "pdserve.engine.attention.flash_attn:FlashAttention",
    "triton": "pdserve.engine.attention.triton_decode:TritonDecode",  # decode steps only
}
