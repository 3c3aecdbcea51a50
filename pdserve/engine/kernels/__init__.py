"""Plug-in table: the small operations between matrix products, by name."""

KERNELS = {
    "torch": "pdserve.engine.kernels.torch_kernels:TorchKernels",
    "native": "pdserve.engine.kernels.native_kernels:NativeKernels",
    "triton": "pdserve.engine.kernels.triton_kernels:TritonKernels",
}
