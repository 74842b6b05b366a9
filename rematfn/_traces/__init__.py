# SPDX-License-Identifier: Apache-2.0
"""Programs written down by sizes: recorded, loaded, simulated."""
