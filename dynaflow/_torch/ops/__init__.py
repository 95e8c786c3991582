"""The operators that dynaflow defines with torch.library, as `torch.ops.dynaflow.*`, by subject."""

import torch

library = torch.library.Library("dynaflow", "FRAGMENT")
"""They are gone when it is gone."""
