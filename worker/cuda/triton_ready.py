"""Whether the Triton kernels can be used at all. Imports no Triton until asked."""

from __future__ import annotations

import logging
from functools import cache

import torch

logger = logging.getLogger(__name__)


@cache
def triton_works(device: torch.device) -> bool:
    """Whether Triton is there and can compile for `device`: it needs a C compiler on this machine, too. Says why not, once."""
    try:
        from quire.worker.cuda import triton_ops

        triton_ops.rms_norm(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-6)
        torch.cuda.synchronize(device)
    except Exception as error:  # of Triton, of the compiler it starts, or of the driver: plain torch serves
        logger.warning("no Triton kernels, plain torch serves instead: %s: %s", type(error).__name__, error)
        return False
    return True
