"""How payloads travel: a transport's name → "module:factory" of its ``Link``."""

TRANSPORTS = {
    "loopback": "kv_transfer.transports.inline:InlineLink",
    "grpc": "kv_transfer.transports.inline:InlineLink",
    "gloo": "kv_transfer.transports.process_group:gloo_link",
    "nccl": "kv_transfer.transports.process_group:nccl_link",
    "cuda_ipc": "kv_transfer.transports.pull_link:cuda_ipc_link",
}
