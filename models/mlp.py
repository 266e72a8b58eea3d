"""SwiGLU feed-forward: W_down (silu(W_gate x) * W_up x), no biases."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint


class SwiGLU(nn.Module):
    def __init__(self, d_model: int, d_ffn: int):
        super().__init__()
        self.gate_proj = nn.Linear(d_model, d_ffn, bias=False)
        self.up_proj = nn.Linear(d_model, d_ffn, bias=False)
        self.down_proj = nn.Linear(d_ffn, d_model, bias=False)
        self.hook_pre = HookPoint()
        self.hook_pre_linear = HookPoint()
        self.hook_post = HookPoint()

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        gate = self.hook_pre(self.gate_proj(x))
        return self.down_proj(self.hook_post(F.silu(gate) * self.hook_pre_linear(self.up_proj(x))))
