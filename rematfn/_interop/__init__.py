# SPDX-License-Identifier: Apache-2.0
"""What torch does that is no operator, and how levels learn of it."""
