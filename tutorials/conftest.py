# SPDX-License-Identifier: Apache-2.0
"""Notebooks are run as such; their sources are no modules."""

collect_ignore_glob = ["*.py"]
