"""Lets torchvision be imported beside a torch that was built for CPUs: there its own library cannot be loaded, and it
asks for two operators as if it had been. Imported before torchvision, by those whose framework wants a part of it."""

from __future__ import annotations

import torch

library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
