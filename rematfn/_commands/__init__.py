# SPDX-License-Identifier: Apache-2.0
"""The commands of ``python -m rematfn``."""
