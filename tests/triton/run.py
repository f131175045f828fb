"""Run the tests of the fused kernels: on the GPU, or in Triton's interpreter where there is none."""

import os
import sys

import pytest
import torch

if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products are then deterministic
    sys.exit(pytest.main([os.path.dirname(__file__), "--override-ini=norecursedirs=", *sys.argv[1:]]))
