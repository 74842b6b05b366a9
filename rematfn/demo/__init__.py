# SPDX-License-Identifier: Apache-2.0
"""The demo: a GPT trained inside a memory budget, with every promise checked while it runs."""
