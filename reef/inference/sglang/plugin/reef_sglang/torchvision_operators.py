"""torchvision's own operators cannot be loaded into a CPU build of torch, and without them it cannot be imported.

SGLang imports it for image models. Two empty declarations are enough for the import; nothing here ever runs them.
"""

from __future__ import annotations

import torch

if torch.version.cuda is None:
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
