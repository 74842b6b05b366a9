# SPDX-License-Identifier: Apache-2.0
"""What rematfn raises, and warns of. Each docstring is its class's page in the documentation."""

__all__ = [
    "BudgetError",
    "DeferredWarning",
    "FloorWarning",
    "NotGuidedWarning",
    "OffloadError",
    "RematError",
    "ReplayError",
    "ThrashingWarning",
]


def expect(
    fits: bool, call: str, needed: str, given: object, kind: type[Exception] = TypeError
) -> None:
    """Raise an error that says what an argument of ``call`` has to be, unless it ``fits``."""
    if not fits:
        raise kind(f"{call}: {needed} is needed, got {given!r}.")


class RematError(Exception):
    """The base of every error of rematfn's own.

    Each of them is also one of Python's: catch :class:`MemoryError` and you catch a
    :class:`BudgetError`. A malformed argument is none of these; it raises :class:`ValueError` or
    :class:`TypeError`, and the message shows the accepted forms.
    """

    def __str__(self) -> str:
        return f"{super().__str__()}\nSee help({type(self).__module__}.{type(self).__name__})."


class BudgetError(RematError, MemoryError):
    """One operator needs more bytes at once than the budget has.

    A running operator needs its inputs and its outputs resident together. The error names that
    number of bytes, and is raised when the kernel asks for memory that does not fit, or before it
    runs: the budget has not been exceeded. Two cases differ. The inputs may not fit together while
    one of them is replayed. And a kernel's scratch memory is known only when the kernel first asks
    for it. After that, such a call is refused before it runs.

    It is also raised when replays cost more than ``remat(..., most_replays=...)`` says, or 100
    times the program: before a call begins that follows a plan, while another one runs, by an
    estimate of its cost, or (with that option) when it returns.

    Example:
        The sine of 256 KiB is 256 KiB, and 64 KiB are not enough to hold it:

        >>> import rematfn, torch
        >>> def loss(x):
        ...     return x.sin().sum()
        >>> x = torch.ones(256, 256)
        >>> rematfn.remat(loss, budget="64KiB")(x)
        Traceback (most recent call last):
        rematfn.BudgetError: ...

    The fix:
        Raise the budget to the number in the message. It has the form that the budget had: bytes, a
        unit, or a fraction. If it was simulated on a record of the whole call, it is enough.
        *About* means that it is enough for what the call has done so far, as in a first call; the
        rest may need more. *At least* means that no smaller budget is enough.
        In these two cases ``rematfn.profile(step, ...).min_budget`` is the budget that a whole step
        needs. Or let the operator do less at once: split the batch, or compute the loss in chunks.
        Where one operator alone needs more than the budget, the message says so: no eviction helps
        then.

        >>> rematfn.remat(loss, budget="1MiB")(x) == loss(x)
        tensor(True)
    """

    __module__ = "rematfn"


class ThrashingWarning(RuntimeWarning):
    """The replays of a call cost more than four times what its program costs.

    A budget that is slightly too small can make a call many times slower than necessary. The
    warning comes once for each function: before the call begins if it follows a plan, otherwise
    when the call and its backward are over. If the call was recorded, the message names roughly the
    least budget in which it would not come. ``remat(f, budget, most_replays=1.5)`` sets another
    limit, and makes it an error.

    :class:`~rematfn.testing.EvictEverything` replays on purpose, and causes no warning.

    Example:
        >>> import rematfn, torch
        >>> def loss(x):
        ...     for _ in range(30):
        ...         x = x.sin() * x
        ...     return x.sum()
        >>> x = torch.ones(1024)
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = rematfn.remat(torch.func.grad(loss), budget="20KiB")(x)
        >>> caught[0].category.__name__
        'ThrashingWarning'

    The fix:
        Raise the budget to the number in the message. If the call may be slow as long as it fits,
        ``most_replays=float("inf")`` turns the warning off.
    """


class OffloadError(RematError, OSError):
    """A value could not be moved to a tier, or cannot be had back from it.

    A full tier or a failed write is no error: the value stays where it is, and others are evicted.
    What cannot be read back is computed again, if that is possible. The error is raised if

    - the folder of a :class:`Disk` cannot be used;
    - a :class:`Host` was asked for and torch knows of no accelerator;
    - a value is read while a stream is captured;
    - a value that cannot be computed again (a constant, a copy of an overwritten argument) is lost:
      the disk failed, its file was damaged, or the parent of a forked process had moved it there.

    Example:
        A folder in memory saves no memory, and is refused:

        >>> import rematfn, torch
        >>> g = rematfn.offload(torch.sin, to=rematfn.Disk("/dev/shm"))
        >>> g(torch.ones(4))
        Traceback (most recent call last):
        rematfn.errors.OffloadError: ...

    The fix:
        Name a folder on a disk that has room: ``rematfn.Disk("/scratch")``.
    """


class NotGuidedWarning(RuntimeWarning):
    """Three calls in a row left the record that they were to follow.

    A policy that plans records a call, and later calls follow the record. Other sizes, skipped
    layers and longer loops do no harm: the call finds its place in the record again. If most of its
    operators are in no record, or replays cost more than was planned, it is not guided any further.
    Results stay the same, but more is replayed than necessary. If the last call left its record at
    an operator, the message names that. The warning comes once for each function.

    Example:
        >>> import itertools, rematfn, torch
        >>> operators = itertools.cycle((torch.sin, torch.cos, torch.tanh, torch.atan))
        >>> def wander(x):
        ...     operator = next(operators)
        ...     for _ in range(40):
        ...         x = operator(x)
        ...     return x.sum()
        >>> g = rematfn.remat(wander, budget="1MiB")
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(8):
        ...         _ = g(torch.ones(4))
        >>> caught[0].category.__name__
        'NotGuidedWarning'

    The fix:
        Pass what decides as an argument: numbers among the arguments choose the record. If that is
        impossible, use ``policy=rematfn.policies.ON()``, which records nothing.
    """


class FloorWarning(RuntimeWarning):
    """One operator needs almost the whole budget, and the replays for it are costly.

    The inputs of an operator and what it allocates are resident at once. If one operator takes more
    than nine tenths of the budget, almost all other values are evicted each time it runs. If
    replays then cost more than the program itself, the message names that operator. The warning
    comes once for each function.

    Example:
        >>> import rematfn, torch
        >>> def loss(x):
        ...     for _ in range(12):
        ...         x = (x[:, None] * x).sin().mean(0)
        ...     return x.sum()
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = rematfn.remat(torch.func.grad(loss), budget="49KiB")(torch.ones(64))
        >>> caught[0].category.__name__
        'FloorWarning'

    The fix:
        Let the operator work on smaller pieces of a batch or of a sequence, or raise the budget.
        :func:`rematfn.explain` names the line.
    """


class DeferredWarning(RuntimeWarning):
    """A call has run no operator: what it returned computes later, outside of every budget.

    A budget bounds the operators that run during the function, and in the backward of its results.
    A result may be an object that holds a module, or a function that closes over one: a lazy
    distribution, a flow, a covariance that is evaluated when it is asked for. What it computes
    later is under no budget. Only the first call of each function is checked.

    Example:
        >>> import rematfn, torch
        >>> net = torch.nn.Linear(4, 4)
        >>> def conditioned(c):
        ...     return lambda x: net(x + c).square().sum()
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = rematfn.remat(conditioned, budget="1MiB")(torch.ones(4))
        >>> caught[0].category.__name__
        'DeferredWarning'

    The fix:
        Transform what computes: ``remat(lambda c, x: conditioned(c)(x), budget)``, or a method,
        ``flow.log_prob = remat(flow.log_prob, budget)``.
    """


class ReplayError(RematError, RuntimeError):
    """A value is needed again, and what it was computed from is no longer there.

    An evicted value is made again by replaying the operators it came from. Those may read tensors
    that rematfn does not own: arguments, parameters, captured tensors. If such a tensor was written
    between the passes, or lost its bytes (``x.untyped_storage().resize_``), a replay would give
    another value than the first run. It raises this error instead. Two kinds of writes are handled
    without an error: those while the function runs, and those by operators that autograd does not
    count, such as a fused optimiser.

    A replay runs under the settings of the first run (``torch.backends``, precisions). If these
    belong to the whole process and have changed, and another thread runs operators meanwhile, the
    error names them.

    With ``remat(..., verify=True)`` it is also raised when an operator computed other bits from the
    same inputs. The message names the operator. Make such a kernel deterministic; or tag it
    ``nondeterministic_seeded`` (:class:`torch.Tag`) if it draws its random numbers from torch's
    generators; or tag it ``nondeterministic_bitwise``, so that its results are kept and never
    replayed.

    Example:
        Between the forward and the backward pass, ``w`` is overwritten in place. The backward pass
        needs the ``x + w`` of the forward::

            def loss(x, w):
                return (x + w).sin().sum()

            value = rematfn.remat(loss, budget="12KiB")(x, w)
            with torch.no_grad():
                w.mul_(0.5)
            value.backward()  # ReplayError, if x + w had been evicted

    The fix:
        Write after the backward pass, as optimisers do; or give the function a copy,
        ``remat(loss, budget)(x, w.clone())``; or rebind instead of writing, ``w = w * 0.5``.
    """

    __module__ = "rematfn"
