# SPDX-License-Identifier: Apache-2.0
"""A bar on standard error for what takes longer than a second."""

from __future__ import annotations

from types import TracebackType
from typing import Any


class Progress:
    """A bar that shows itself after a second, where `tqdm` is installed; a context manager.

    Args:
        steps: How many there will be.
        what: What they do, in a word.
        is_shown: Without, it does nothing.
    """

    def __init__(self, steps: int, what: str, is_shown: bool = True) -> None:
        self._bar: Any = None
        if not is_shown:
            return
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            return
        self._bar = tqdm(total=steps, desc=what, unit="step", leave=False, delay=1)

    def step(self) -> None:
        """Note that a step is done."""
        if self._bar is not None:
            self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
