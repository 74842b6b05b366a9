# SPDX-License-Identifier: Apache-2.0
"""Animals of the zoo that write in place, take views, draw numbers or touch unusual tensors."""

from collections import namedtuple

import torch
from programs import Case, animal, leaf
from torch import Tensor, nn

# --- views and writes -------------------------------------------------------------------------


@animal("views-of-views")
def views_of_views() -> Case:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.exp()
        a = y.view(2, 12).t()[2:8].unsqueeze(0)
        b = a.squeeze(0)[::2].expand(2, 3, 2).permute(2, 0, 1)
        c = y.as_strided((3, 3), (4, 1), 1).diagonal()
        return a.sin() * 2, b.sum(0), c.cos(), y.flatten()[3:7].unfold(0, 2, 1) * 3, b

    return Case(f, (leaf(4, 6),))


@animal("split-unbind-chunk")
def split_unbind_chunk() -> Case:
    def f(x: Tensor) -> list[Tensor]:
        y = x.tanh()
        parts = [*y.split([1, 2, 3], 1), *y.chunk(2, 0), *y.unbind(0)]
        return [(p * k).sum() for k, p in enumerate(parts, 1)] + list(y.sin().unbind(1))

    return Case(f, (leaf(4, 6),))


@animal("in-place")
def in_place() -> Case:
    """Every old content is read again after the write: a replay must recompute it."""

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        old = y * 2
        y.mul_(x)
        middle = y + old
        y.add_(middle).clamp_(min=-0.5)
        z = torch.zeros_like(y)
        z += y * old
        z[1:3].add_(middle[1:3])
        z[0] = y[1]
        return z * middle + old

    return Case(f, (leaf(4, 5),))


@animal("write-through-a-view")
def write_through_a_view() -> Case:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        base = x * 3
        before = base + 0.5  # saves nothing, so that autograd allows the writes
        view = base.view(-1)[2:14].view(3, 4)
        view.t()[1].mul_(2.0)
        base[0].sub_(1)
        return view * before.view(-1)[:12].view(3, 4), base + before

    return Case(f, (leaf(4, 5),))


@animal("fill-and-accumulate")
def fill_and_accumulate() -> Case:
    def f(x: Tensor) -> Tensor:
        out = torch.empty(6, 4)
        for k, row in enumerate(x.unbind(0)):
            out[k].copy_(row.sin())
        total = torch.zeros(4)
        for k in range(6):
            total.add_(out[k] * k).mul_(0.9)
        index = torch.tensor([0, 2, 2, 5])
        out.index_put_((index,), x[:4] * 2, accumulate=True)
        out.index_add_(0, index, x[:4]).scatter_add_(0, index.view(4, 1).expand(4, 4), x[2:])
        out.masked_fill_(out > 3, 0.25)
        return out * total

    return Case(f, (leaf(6, 4),))


@animal("out-variants", differentiable=False)
def out_variants() -> Case:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        a, b, small = torch.empty(4, 4), torch.ones(4, 4), torch.empty(0)
        torch.mm(x, x, out=a)
        c = a.sin()
        torch.add(a, b, out=b)
        torch.cat([a, b], out=small)
        values, indices = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.sort(b, dim=0, out=(values, indices))
        torch.mul(c, c, out=c.view(4, 4))
        return a + b, small, values, indices, c

    return Case(f, (torch.randn(4, 4),))


@animal("metadata-in-place", differentiable=False)
def metadata_in_place() -> Case:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2).unsqueeze_(0).transpose_(0, 1)
        z = x.sin()
        z.resize_(3, 2).add_(1)
        w = x.cos()
        w.set_(z)
        w.t_().mul_(2)
        return y.cos(), z * 3, w + 1

    return Case(f, (torch.randn(4, 5),))


@animal("argument-mutation", differentiable=False)
def argument_mutation() -> Case:
    def f(x: Tensor, y: Tensor) -> Tensor:
        before = x.sin()
        x.add_(1)
        after = x.cos()
        x[1:].mul_(y[1:].exp_())
        return before * after + x

    return Case(f, (torch.randn(4, 3), torch.randn(4, 3)))


@animal("buffer-mutation")
def buffer_mutation() -> Case:
    state, count = torch.randn(3), torch.zeros((), dtype=torch.long)

    def f(x: Tensor) -> Tensor:
        y = x + state  # its replay must read the old state
        state.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        count.add_(1)
        return (y * state).sin() * count

    return Case(f, (leaf(4, 3),), [state, count])


@animal("foreach")
def foreach() -> Case:
    def f(x: Tensor, y: Tensor) -> list[Tensor]:
        values = [t.sin() for t in (x, y, x[:2])]
        old = torch._foreach_mul(values, 2.0)
        moments = [v.detach() for v in torch._foreach_neg(values)]  # written as optimisers do
        torch._foreach_add_(moments, [v.detach() for v in old], alpha=0.5)
        torch._foreach_lerp_(moments, [v.detach() for v in values], 0.3)
        return [*torch._foreach_exp(torch._foreach_mul(old, moments)), *moments]

    return Case(f, (leaf(4, 3), leaf(2, 2)))


@animal("optimiser-step", differentiable=False)
def optimiser_step() -> Case:
    """A whole training step, optimiser and all, inside the level: nothing of it leaves."""
    net = nn.Linear(4, 3)
    adam = torch.optim.Adam(net.parameters(), lr=0.1)

    def f(x: Tensor) -> Tensor:
        for _ in range(2):
            adam.zero_grad()
            loss = net(x).tanh().square().sum()
            loss.backward()
            adam.step()
        return loss.detach()

    return Case(f, (torch.randn(5, 4),), list(net.parameters()))


# --- drawn numbers, several outputs, unusual tensors --------------------------------------------


@animal("random")
def random() -> Case:
    own = torch.Generator().manual_seed(5)

    def f(x: Tensor) -> Tensor:
        y = x * torch.rand(4, 3) + torch.randn_like(x)
        y = nn.functional.dropout(y, 0.4) * torch.bernoulli(torch.full((4, 3), 0.5), generator=own)
        noise = torch.empty(4, 3).uniform_(-1, 1, generator=own)
        order = torch.randperm(4)
        y = nn.functional.rrelu(y, training=True) + noise.normal_() * torch.randint(3, (4, 3))
        return y[order] * torch.rand(4, 3, generator=own).exponential_()

    return Case(f, (leaf(4, 3),), generators=[own])


@animal("several-outputs")
def several_outputs() -> Case:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        best, where = y.topk(2, dim=1)
        ordered, index = y.sort(dim=0, descending=True)
        most, at = y.max(dim=1)
        variance, mean = torch.var_mean(y, dim=0)
        q, r = torch.linalg.qr(y[:4, :4] + 2 * torch.eye(4))
        return best, where, ordered * 2, index, most, at, variance * mean, q @ r, y.median(0)[0]

    return Case(f, (leaf(5, 4),))


@animal("several-results-of-odd-types")
def odd_types() -> Case:
    pair = namedtuple("pair", "low high")

    def f(x: Tensor) -> dict[str, object]:
        y = x.cos()
        words = {"half": y.half() * 2, "double": y.double().sin(), "bits": y > 0}
        whole = (y * 100).to(torch.int16) // 3
        return words | {"pair": pair(y.amin(), [y.amax(), None]), "whole": whole, "name": "y"}

    return Case(f, (leaf(3, 4),))


@animal("complex")
def complex_numbers() -> Case:
    def f(z: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        spectrum = torch.fft.rfft(x.tanh())
        w = z.conj() * torch.polar(x.exp(), x)
        w = w + torch.complex(x, x.sin()) * 1j
        return w.abs(), w.real * w.imag, torch.fft.irfft(spectrum * 2, n=5), w.conj(), w.mH @ w

    return Case(f, (leaf(4, 5, dtype=torch.complex64), leaf(4, 5)))


@animal("zero-size")
def zero_size() -> Case:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        none = x[:, :0].sin()
        wide = torch.cat([none, x.cos(), none], 1)
        return none, wide, none @ none.t() + x.sum(), none.sum(), torch.empty(0, 3) * 2

    return Case(f, (leaf(3, 4),))


@animal("not-a-number")
def not_a_number() -> Case:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = (x - x[0]) / (x - x[0])
        return y.sin(), torch.where(y.isnan(), x, y).log(), x.log() * 0.0, (x * 1e38) ** 2

    return Case(f, (leaf(4, 3),))


@animal("factories")
def factories() -> Case:
    def f(x: Tensor) -> Tensor:
        y = torch.zeros(4, 3) + torch.arange(3) * torch.full((4, 1), 0.5) - torch.ones_like(x)
        y = y + torch.linspace(0, 1, 3) + torch.eye(4, 3) + torch.tensor([1.0, 2.0, 3.0])
        return (x * y + x.new_full((4, 3), 2.0) + torch.randn(4, 3)).sin() + torch.empty(3).fill_(7)

    return Case(f, (leaf(4, 3),))


@animal("lerp-where-scan")
def lerp_where_scan() -> Case:
    def f(x: Tensor, w: Tensor) -> Tensor:
        y = torch.where(x > 0, x.cumsum(0), x.cumprod(1)).logcumsumexp(0)
        y = torch.lerp(y, w, w.sigmoid()) + torch.cummax(x, 0)[0]
        mirrored = nn.functional.pad(w[:, 1:-1], (1, 1), mode="reflect")
        y = nn.functional.layer_norm(y, (5,)) + mirrored
        return torch.einsum("ij,kj->ik", y, x.gather(0, x.argsort(0))).logsumexp(1)

    return Case(f, (leaf(4, 5), leaf(4, 5)))


@animal("captured-constant")
def captured_constant() -> Case:
    """A leaf, a plain tensor and a non-leaf made before the level, all closed over."""
    weight, table = leaf(3, 3), torch.randn(3, 3)
    made = weight * 2

    def f(x: Tensor) -> Tensor:
        return torch.tanh(x @ weight + x @ made) @ table

    return Case(f, (leaf(4, 3),), [weight, table])
