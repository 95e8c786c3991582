"""The operators that dynaflow defines with torch.library, as `torch.ops.dynaflow.*`, by subject."""

import torch

library = torch.library.Library("dynaflow", "FRAGMENT")
"""Owns the definitions: they vanish with it."""
