# SPDX-License-Identifier: Apache-2.0
"""What calls of a transformed function did, and why."""
