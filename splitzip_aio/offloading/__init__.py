"""Models that do not fit: ``offload`` runs any ``torch.nn.Module`` in a part of the memory that its weights need.

::

    model = offload(model, "cache/", device="cuda", resident_bytes="4GiB")
    model(...)  # under torch.no_grad() or torch.inference_mode()
    detach(model)
"""

from __future__ import annotations

from splitzip_aio.offloading.attach import OffloadStatistics, detach, offload, offload_statistics
from splitzip_aio.offloading.placeholder import OffloadWarning

__all__ = ["OffloadStatistics", "OffloadWarning", "detach", "offload", "offload_statistics"]
