// SPDX-License-Identifier: Apache-2.0
//
// boundary.h: what leaves a level: outputs, and gradients of any order.
//
// Note [What leaves is sealed]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A tensor that the caller ends up holding must not belong to a level: it would keep lineage alive
// and could be evicted under the caller's feet. To seal it is to make it resident, forget its
// lineage, stop counting it and take the key off; nothing is copied and it stays the same tensor.
// If an enclosing level runs, the cell is handed to that level instead, lineage and all.
//
// Outputs are sealed as `f` returns. Gradients leave later, through edges of the autograd graph from
// a node made in the region to one made before it. That node gets a hook that seals what arrives.
// Arguments, captured tensors and parameters need no other care than that.
//
// With create_graph, as torch.func.grad always has it, a gradient that leaves brings along a graph
// whose own edges leave the region too: y = x.sin() gives dx = g * x.cos(), which reaches x past
// every hook set when `f` returned. So sealing a tensor always walks the graph behind it; what one
// walk has visited the next one skips, and the walks of all orders together are linear.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "levels/level.h"

namespace rematfn {

// How the function of a level ends.
enum class Ending : std::uint8_t { kReturned, kFailed, kInterrupted };
// Takes the level off this thread's stack. What a function that has returned leaves is still to be
// sealed, and handed over. Throws if calls are interleaved: see Note [Calls that are interleaved].
void end_level(LevelHandle& handle, Ending ending);

// `f` has returned: seals what leaves, `tensors` and the gradients of leaves, and hands over the rest.
// `goes_on`: hooks go on with the call later, and may ask for what it has stored away.
//
// Note [Results count until the last is there]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// What is handed out is there all at once when the call is over. If a result did not count from the
// moment that it is sealed, those that had been evicted would be replayed into the room of those that
// are there already: a call with many gradients would hold all of them and what replays take, whatever
// its budget. So they are made resident together, and count until the last of them is there. If that
// does not fit, it is a BudgetError. What `f` stores away leaves with them, as far as that is known by
// then, and the rest after them, in their room.
//
// Returns the bytes of what `f` has stored away: what leaves and is neither of the two.
std::size_t hand_out(LevelHandle& handle, const std::vector<at::Tensor>& tensors, bool goes_on);
// Seals `tensor` for `level`, through functorch's wrappers, subclasses and forward-mode tangents.
void seal(const at::Tensor& tensor, Level& level);
// gradient_edges.cpp. Watches the edges by which the graph behind `tensor` leaves the level's region, with
// hooks on the nodes there, and where its backward begins. See Note [What leaves is sealed].
void cut_graph(const at::Tensor& tensor, Level& level);
// A backward that enters the level looks at the hooks of `leaf` again. The level's domain is locked.
void remember_leaf(const at::Tensor& leaf, WatchedLeaves& leaves);
// Gives a level tensor's cell to `heir`, or to the caller if there is none. The lock of its domain is
// held.
void give_cell(c10::TensorImpl& tensor, Cell& cell, Level* heir);
// Notes a leaf that may be given a gradient while the level is active.
void note_leaf(Level& level, c10::TensorImpl& tensor);

// Puts the handle of the argument that it is a view of on each result of an operator that we did not
// see. See Note [Which key we borrow]: view kernels copy the key, not the handle.
void share_handles(c10::ArrayRef<at::Tensor> results, c10::ArrayRef<at::Tensor> arguments);
[[nodiscard]] bool has_key(const at::Tensor& tensor);
// The program marks the contents of `tensor`, with a name or an empty one, for policies that respect
// it. Whatever no level made is left alone.
void mark(const at::Tensor& tensor, const std::string& name);

}  // namespace rematfn
