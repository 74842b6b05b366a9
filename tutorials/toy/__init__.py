# SPDX-License-Identifier: Apache-2.0
"""A dispatcher, and vmap, grad and remat as levels of one stack. README.md says where to begin."""

from .grad import grad
from .operators import Array
from .remat import remat
from .vmap import vmap

__all__ = ["Array", "grad", "remat", "vmap"]
