// Makes a group of some ranks of another group, without the store.
#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"

namespace smddp::engine {

// All ranks of `parent` call this with the members of the group that they are to be in. A rank that is to be in none
// may pass any list. Throws Mismatch, the same on all ranks, if two members of a group pass different lists.
void agreeOnMembers(Engine& engine, const std::shared_ptr<groups::Group>& parent,
                    const std::vector<Rank>& members, Nanoseconds timeout);

// Makes a group of `members`, which are ranks of `parent` and know one another already: it takes two small messages
// from each to the first of them, and two back. All members call this with the same list, and make such calls in the
// same order. If one of them cannot join, all throw why.
std::shared_ptr<groups::Group> splitGroup(Engine& engine,
                                          const std::shared_ptr<groups::Group>& parent,
                                          groups::GroupSpec spec, const std::vector<Rank>& members,
                                          Nanoseconds timeout);

}  // namespace smddp::engine
