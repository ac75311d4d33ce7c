// The members of a group, on which the processes agree themselves: when one has died or a newcomer waits, they decide
// who goes on and which training step counts (engine/agreement), and the group gets these members.
//
// Threads: one at a time; the group is called by no other meanwhile. Blocks where it says so, without Python's
// interpreter lock, and hears signals. Errors: as ProcessGroup.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/member_agreement.h"
#include "process_group/process_group.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE
namespace smddp::process_group {

class ElasticMembers {
 public:
  // One generation of members.
  struct Members {
    uint64_t number = 0;  // 1, 2, …
    int rank = 0;
    std::vector<std::string> cards;  // by rank
    int64_t step = 0;                // how many steps count
    std::vector<std::string> left;   // since the generation before
    std::vector<std::string> came;
    std::string out;  // why this process is a member no more; then there is nothing else
  };

  // `grace`: how long ranks that may be a minority wait for news of the others.
  ElasticMembers(c10::intrusive_ptr<ProcessGroup> group, Nanoseconds grace);

  // How others reach this process; the same for its whole life.
  const std::string& card() const { return card_; }
  // The first members, in the order of their ranks; each calls this with the same cards. Blocks.
  Members begin(const std::vector<std::string>& cards, int64_t step, Nanoseconds timeout);
  // A newcomer: waits until these members let it in. They have to be told of its card: hear(). Blocks.
  Members join(const std::vector<std::string>& cards, Nanoseconds timeout);
  // A process with this card wants to become a member: agree() lets it in, if one of the members has heard of it.
  void hear(const std::string& card);
  // How many such processes wait. Answers what others have asked meanwhile.
  size_t numNewcomers();
  // The group has failed, or newcomers wait: agrees on the next members, and gives the group these. `committed`,
  // `voted`: the last step that this rank has committed, and voted for. Blocks.
  Members agree(int64_t committed, int64_t voted, Nanoseconds timeout);

 private:
  Members install(const engine::agreement::Generation& before, const Deadline& deadline);
  Members membersSince(const engine::agreement::Generation& before);

  const MonotonicClock clock_;
  const c10::intrusive_ptr<ProcessGroup> group_;
  const std::string card_;
  engine::MemberAgreement agreement_;
};

}  // namespace smddp::process_group
#endif
