# SPDX-License-Identifier: Apache-2.0
"""The transforms `remat` and `checkpoint`, and what a call of them is: a level."""
