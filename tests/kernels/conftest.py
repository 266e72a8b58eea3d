"""Triton kernels run compiled where there is a GPU and in Triton's interpreter elsewhere."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any kernel module is imported
