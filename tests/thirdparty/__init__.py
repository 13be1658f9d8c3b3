"""Models of other libraries, each trained on one device, under DDP and under this package."""

import tests.thirdparty.torchvision_ops  # noqa: F401  (before Lightning, which imports torchvision)
