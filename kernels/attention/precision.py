"""The dtype rule of attention: the operands' common dtype, or autocast's where autocast is on."""

import torch
from torch import Tensor


def common_dtype(query: Tensor, key: Tensor, value: Tensor | None) -> torch.dtype:
    """Made explicit, because custom operations and FlexAttention get no cast from autocast."""
    if torch.is_autocast_enabled(query.device.type):
        return torch.get_autocast_dtype(query.device.type)
    work = torch.promote_types(query.dtype, key.dtype)
    return work if value is None else torch.promote_types(work, value.dtype)
