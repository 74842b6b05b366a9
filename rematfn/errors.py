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

    A running operator needs its inputs and its outputs resident together. What that comes to is
    known before it runs, and the error is raised then: the budget has not been exceeded. Two cases
    are found out later. The inputs may not fit together while one of them is replayed. And a
    kernel's scratch memory is learnt when the kernel first asks for it, in the middle of its run;
    from then on such a call is refused beforehand.

    With ``remat(..., most_replays=...)`` it is also raised when replays cost more than that: before
    a call that follows a plan begins; while another runs, once it has passed the limit by what can
    be told of its cost; or as it returns.

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
        Raise the budget to the number in the message, which is written as the budget was: in bytes,
        in its unit, or as a fraction. If it was tried out on a record of the whole call, it is
        enough; on a first call it says *about*: it is enough for what the call has done by then,
        and what comes after may need more; *at least* is said of the least that can do. The message
        says which. ``stats(g).min_budget`` is the largest need of one operator so far. Or let the
        operator do less at once: split the batch, or compute the loss in chunks. Where one operator
        alone reads and allocates more than the budget, the message says so: no eviction helps then.

        >>> rematfn.remat(loss, budget="1MiB")(x) == loss(x)
        tensor(True)
    """

    __module__ = "rematfn"


class ThrashingWarning(RuntimeWarning):
    """The replays of a call cost more than four times what its program costs.

    A budget a little too small can make a call many times slower than it need be. So the first call
    of a transformed function that replays this much is told of: one that follows a plan before it
    begins, another when it is over, its backward included. The message names the least budget in
    which it would not, or about that, if the call was recorded. Once for each function. To ask for
    an error instead, or for another limit, say so: ``remat(f, budget, most_replays=1.5)``.

    :class:`~rematfn.testing.EvictEverything`, which is there to replay, is not warned of.

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
        Raise the budget to the number in the message. Where a call has to fit that is slow, give
        ``most_replays=float("inf")``, and nothing is said.
    """


class OffloadError(RematError, OSError):
    """A value could not be moved to a tier, or cannot be had back from it.

    That the tier is full, or that a write fails, is no error: the value stays where it is, and
    something else goes. What cannot be read back is computed again, if that is possible. This is
    raised for the rest: the folder of a :class:`Disk` cannot be used; a :class:`Host` was asked for
    where torch knows of no accelerator; a value is read while a stream is captured; or one that
    nothing can compute again (a constant, a copy of an argument that was overwritten) was on a disk
    that fails, on one whose file was damaged, or moved there by the parent of a forked process.

    Example:
        A folder that lies in memory saves none:

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

    A policy that plans records a call and guides those after it. Other sizes, layers that are left
    out and loops that run more often do no harm: the guide finds its place again. Where most of the
    operators that run are in no record, nothing can be foreseen. Results do not depend on it; what
    is replayed is more than need be. The message names the operator at which the last one was lost.
    Once for each function.

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
        Give the function what decides as an argument: a number among the arguments tells calls
        apart. Where that cannot be, ``policy=rematfn.policies.ON()`` records nothing.
    """


class FloorWarning(RuntimeWarning):
    """One operator needs almost the whole budget, and what is replayed for that costs much.

    The inputs of an operator and what it allocates are resident at once. Where one operator takes
    more than nine tenths of the budget, all else has to go for it, each time; if replays then cost
    more than the program itself, the message names that operator. Once for each function.

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
        Have the operator work in smaller pieces, of a batch or of a sequence; or raise the budget.
        :func:`rematfn.explain` names the line.
    """


class DeferredWarning(RuntimeWarning):
    """A call has returned what is computed with later, where no budget is.

    A budget governs the operators that run while the function does, and in the backward of what it
    returns. What is returned may be an object that holds a module, or a function that closes over
    one: a lazy distribution, a flow, a covariance that is evaluated when it is asked for. What that
    computes later, it computes as if nothing had been transformed. Neither has a budget any effect
    on a call that runs no operator. The first call of each function is looked at.

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
        Transform what computes: ``remat(lambda c, x: conditioned(c)(x), budget)``. Methods of a
        module can be named: ``remat(module, budget, methods=["log_prob"])``.
    """


class ReplayError(RematError, RuntimeError):
    """A value is needed again, and what it was computed from is no longer there.

    An evicted value is rematerialised by replaying the operators it came from. Those may read
    tensors that rematfn does not own: arguments, parameters, captured tensors. rematfn sees it when
    they are written while the function runs, and when an operator writes them for which autograd
    counts nothing, such as a fused optimiser. When they are written elsewhere, or lose their bytes
    (``x.untyped_storage().resize_``), a replay would give another value than the first time; it
    raises instead.

    A replay runs under the settings of the first run (``torch.backends``, precisions). Where these
    are the whole process's and have changed, and another thread runs operators meanwhile, it raises
    and names them.

    With ``remat(..., verify=True)`` it is also raised when an operator, given what it was given the
    first time, computed something else. The message names the operator and the first element that
    differs. Such a kernel can be made deterministic, or tagged ``nondeterministic_seeded`` if it
    draws its random numbers from torch's generators, or ``nondeterministic_bitwise``
    (:class:`torch.Tag`), by which its results are kept and never replayed.

    Example:
        Between the forward and the backward pass, ``w`` is overwritten in place. The backward pass
        needs ``x + w`` as it was::

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
