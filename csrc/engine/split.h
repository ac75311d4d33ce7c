// Groups made of a group's ranks without the store.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"

namespace smddp::engine {

// All ranks of `parent` say which ranks the group of each is to have; a rank that is to be in none may say anything.
// Throws Mismatch, the same on all of them, if a member of a group names other members, or in another order.
void agreeOnMembers(Engine& engine, const std::shared_ptr<Group>& parent,
                    const std::vector<Rank>& members, Nanoseconds timeout);

// A group of some of `parent`'s ranks, who know one another already: no store, one small message from each to the
// first of them and back. `members` are ranks of the parent; all of them call this with the
// same list, and make their calls in the same order.
std::shared_ptr<Group> splitGroup(Engine& engine, const std::shared_ptr<Group>& parent,
                                  const Group::Spec& spec, const std::vector<Rank>& members,
                                  Nanoseconds timeout);

}  // namespace smddp::engine
